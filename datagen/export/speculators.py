"""The data directory that speculators (0.9) trains from.

    <out>/                         datasets.save_to_disk, torch format: input_ids, loss_mask
                                   list<int64>, seq_len
    <out>/token_freq.pt            torch dict: supervised token id -> occurrences
    <out>/hidden_states/hs_<i>.safetensors   row i of the dataset:
        hidden_states  bf16 [T, K+1, H]   the boundaries, then the verifier's last state BEFORE its norm
        token_ids      int64 [T]
The trainer applies the verifier's final norm itself, so a stored post-norm state is divided by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datagen.errors import ExportRefused
from datagen.export.norm import before_norm, final_norm_weight
from datagen.export.samples import Source, supervised_frequencies


def export_speculators(source: Source, splits: list[str], out: Path, checkpoint: Path) -> int:
    """Fill `out`; returns samples written. Raises ExportRefused, CorruptFile."""
    import torch
    from datasets import Dataset, Features, Sequence, Value
    from datasets.arrow_writer import ArrowWriter
    from safetensors.torch import save_file

    states = source.manifest.states
    if states.dtype != "BF16":
        raise ExportRefused(
            f"speculators reads bfloat16, the run holds {states.dtype}", where=source.root,
            fix="capture in bfloat16",
        )  # fmt: skip
    post = states.final_norm == "post"
    factor_H = final_norm_weight(checkpoint, states.hidden_size) if post else None
    folder = out / "hidden_states"
    folder.mkdir()
    frequencies: Counter[int] = Counter()
    rows: list[tuple[str, int]] = []

    def write(row_of: int, columns: Any, shard: Any, row: int) -> None:
        bits_TLH = shard.states(row)
        if factor_H is not None:
            bits_TLH[:, -1] = before_norm(bits_TLH[:, -1], factor_H)
        tensor = torch.from_numpy(bits_TLH.view(np.int16)).view(torch.bfloat16)
        ids = torch.from_numpy(columns.input_ids.astype(np.int64))
        save_file({"hidden_states": tensor, "token_ids": ids}, folder / f"hs_{row_of}.safetensors")

    def described() -> Iterator[dict[str, Any]]:
        for split in splits:
            for columns, shard, row in source.samples(split):
                write(len(rows), columns, shard, row)
                rows.append((columns.sample_id, columns.n_tokens))
                counted = supervised_frequencies(columns)
                frequencies.update({int(i): int(counted[i]) for i in np.flatnonzero(counted)})
                yield {
                    "input_ids": columns.input_ids.astype(np.int64),
                    "loss_mask": columns.loss_mask.astype(np.int64),
                    "seq_len": columns.n_tokens,
                }

    features = Features(
        {
            "input_ids": Sequence(Value("int64")),
            "loss_mask": Sequence(Value("int64")),
            "seq_len": Value("int64"),
        }
    )
    # Row by row to disk: ids of a whole run do not fit in memory as Python lists.
    raw = out / "rows.arrow"
    with ArrowWriter(path=str(raw), features=features) as writer:
        for described_row in described():
            writer.write(described_row)
        writer.finalize()
    rows_on_disk = Dataset.from_file(str(raw)).with_format("torch")  # its reader expects tensors
    rows_on_disk.save_to_disk(str(out / "unnamed"))
    raw.unlink()
    for path in (out / "unnamed").iterdir():
        path.rename(out / path.name)
    (out / "unnamed").rmdir()
    torch.save(dict(frequencies), out / "token_freq.pt")
    return len(rows)
