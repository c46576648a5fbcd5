"""The directory of hidden states that SpecForge's offline EAGLE-3 training reads.

    <out>/rows_<a>-<a+2000>/data_<i>.ckpt   torch dict:
        input_ids         int64 [T]
        loss_mask         int64 [T]
        hidden_state      [1, T, H]     the last state, AFTER the final norm: its training "target"
        aux_hidden_state  [1, T, K*H]   the boundaries side by side: its training "hidden_state"
Its trainer multiplies the last state by the head as it is, so it must be post-norm.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datagen.errors import ExportRefused
from datagen.export.samples import Source

FILES_A_FOLDER = 2000


def export_specforge(source: Source, splits: list[str], out: Path) -> int:
    """Fill `out`; returns samples written. Raises ExportRefused, CorruptFile."""
    import torch

    states = source.manifest.states
    if states.final_norm != "post":
        raise ExportRefused(
            "SpecForge reads the final state after the norm, the run holds it before",
            where=source.root,
            fix="export for speculators, which applies the norm itself",
        )
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16}
    if states.dtype not in kinds:
        raise ExportRefused(f"states of {states.dtype} cannot be exported", where=source.root)
    written = 0
    for split in splits:
        for columns, shard, row in source.samples(split):
            begin = written - written % FILES_A_FOLDER
            folder = out / f"rows_{begin}-{begin + FILES_A_FOLDER}"
            folder.mkdir(exist_ok=True)
            bits_TLH = shard.states(row)
            tensor = torch.from_numpy(bits_TLH.view(np.int16)).view(kinds[states.dtype])
            torch.save(
                {
                    "input_ids": torch.from_numpy(columns.input_ids.astype(np.int64)),
                    "loss_mask": torch.from_numpy(columns.loss_mask.astype(np.int64)),
                    "hidden_state": tensor[None, :, -1].clone(),
                    "aux_hidden_state": tensor[None, :, :-1].flatten(2).clone(),
                },
                folder / f"data_{written}.ckpt",
            )
            written += 1
    return written
