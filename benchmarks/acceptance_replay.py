"""How long replay takes for many held-out samples at SmolLM2's size, on a CPU or a GPU.

States, ids and the drafter's weights are drawn. What they are decides only how long drafts stay alive,
and so how many rows go on to the next depth; both ends are timed: drawn ids, where nearly every draft
dies at once, and every row at every depth, as if all were accepted. A trained drafter lies between.
Reading is timed too: the samples are stored by `plane`, and decoded as `datagen evaluate` does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datagen.acceptance.replay import Replay, find_device
from datagen.drafter.config import DrafterConfig
from datagen.drafter.model import Drafter
from datagen.drafter.rope import Rope
from datagen.drafter.rows import Sample
from datagen.store.encoder import Encoder
from datagen.store.states import ShardReader, StatesSpec, to_batch

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, BOUNDARIES = 576, 49_152, 32_000, (2, 15, 27)
CONTEXT, RESPONSE = (32, 480), (64, 704)  # tokens, drawn evenly: 640 a sample in the mean
BAR_S = 30.0


def timed(args: argparse.Namespace) -> dict[str, Any]:
    """Both ends, after a warm-up on a few samples."""
    device = find_device(args.device)
    rng = np.random.default_rng(0)
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
        vocab_size=VOCABULARY, draft_vocab_size=DRAFT_VOCABULARY, rope=Rope(100_000.0),
        max_positions=8192, boundaries=BOUNDARIES, rms_norm_eps=1e-5,
    )  # fmt: skip
    drafter = Drafter(config)
    drafter.initialise(0)
    known = np.sort(rng.permutation(VOCABULARY)[:DRAFT_VOCABULARY])
    drafter.d2t.copy_(torch.from_numpy(known - np.arange(DRAFT_VOCABULARY)))
    drafter.t2d[torch.from_numpy(known)] = True
    embed_VH = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))
    replay = Replay(drafter, embed_VH, steps=args.steps, device=device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states-000.arrow"
        write_shard(path, args.samples, rng)
        few = [s for s, _ in zip(samples(path), range(8), strict=False)]
        list(replay.run(few))
        replay.drafts(few, prune=False)
        whole, found = _clocked(device, lambda: [r.counts for r in replay.run(samples(path))])
        held = list(samples(path))
        pruned, _ = _clocked(device, lambda: [r.counts for r in replay.run(held)])
        batches = list(replay._batches(held))
        unpruned, _ = _clocked(device, lambda: [replay.drafts(b, prune=False) for b in batches])
    tokens = sum(len(s.ids_N) for s in held)
    answered = sum(c.tokens for c in found)
    return {
        "samples": args.samples, "tokens": tokens, "response_tokens": answered,
        "draft_steps": args.steps, "dtype": "float32",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "seconds_with_reading": whole, "seconds": pruned, "seconds_every_row_at_every_depth": unpruned,
        "seconds_at_most": whole - pruned + unpruned,
        "response_tokens_per_s_at_most": answered / (whole - pruned + unpruned),
        "bars": (
            {"1,000 samples in less than 30 s, reading included": whole - pruned + unpruned < BAR_S}
            if args.samples >= 1000 and device.type == "cuda" else {}
        ),
    }  # fmt: skip


def _clocked(device: torch.device, work: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def write_shard(path: Path, count: int, rng: np.random.Generator) -> None:
    """`count` samples of drawn states, as a sealed shard holds them."""
    import pyarrow as pa

    spec = StatesSpec(BOUNDARIES, "post", "BF16", HIDDEN, "plane")
    encode, writer = Encoder(spec), None
    pool = rng.standard_normal((8192, spec.width), dtype=np.float32).view(np.uint32) >> 16
    pool_TW = pool.astype(np.uint16)
    with path.open("wb") as file:
        for number in range(count):
            context, said = (int(rng.integers(*span)) for span in (CONTEXT, RESPONSE))
            n = context + said
            start = int(rng.integers(0, len(pool_TW) - n))
            encoded = encode(pool_TW[start : start + n])
            if writer is None:
                params, schema = encoded.params, spec.schema(encoded.params)
                writer = pa.ipc.new_file(file, schema)
            elif encoded.params != params:
                encoded = encode.again(encoded, params)
            ids = rng.integers(0, VOCABULARY, n).astype(np.int32)
            writer.write_batch(
                to_batch(schema, prompt_id=f"{number:064x}", turn=0, input_ids=ids,
                         n_context=context, encoded=encoded)
            )  # fmt: skip
        assert writer is not None
        writer.close()


def samples(path: Path) -> Iterator[Sample]:
    """Read and decoded one by one."""
    reader = ShardReader(path)
    for row in range(len(reader)):
        columns = reader.columns(row)
        states_TLH = torch.from_numpy(reader.states(row).view(np.int16)).view(torch.bfloat16)
        yield Sample(
            columns.sample_id, torch.from_numpy(columns.input_ids.astype(np.int64)),
            columns.n_tokens - int(columns.loss_mask.sum()), states_TLH[:, :-1].flatten(1), None,
        )  # fmt: skip
