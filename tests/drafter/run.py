"""A finished run of the tiny target: its real states, its own greedy text, through the real store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from datagen.embedded.model import Llama
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import ManifestHeader, StatesEntry, build_manifest
from datagen.store.partition import PartitionStore
from datagen.store.plan import Plan, write_plan
from datagen.store.states import StatesSpec
from tests.store.rows import planned, prompt_id, response
from tests.tiny import BOUNDARIES, HIDDEN, write_tiny_checkpoint

SPEC = StatesSpec(
    boundaries=BOUNDARIES, final_norm="post", dtype="BF16", hidden_size=HIDDEN, codec="plane"
)
MODEL = "tests/tiny-llama"
CONVERSATIONS = 6


def tiny_target(folder: Path) -> Path:
    directory = folder / "tiny-llama"
    return directory if directory.exists() else write_tiny_checkpoint(directory)


def write_run(
    root: Path, checkpoint: Path, *, train: int = 24, heldout: int = 6, first: int = 0,
    poison: int | None = None, overlap: bool = False,
) -> Path:  # fmt: skip
    """manifest.json of `train` + `heldout` samples. `poison`: the number whose states hold a NaN;

    `overlap`: the held-out prompts are the first training prompts.
    """
    layout = RunLayout(root)
    root.mkdir(parents=True)
    numbers = list(range(first, first + train))
    held = numbers[:heldout] if overlap else list(range(first + train, first + train + heldout))
    rows = [planned(n) for n in numbers]
    rows += [planned(n, partition=1, split="heldout") for n in held]
    digest = write_plan(layout.plan, rows, {"mix": "made-up"})
    fingerprint = Fingerprint({"plan": digest, "first": first})
    fingerprint.save(layout.fingerprint)
    model = Llama.load(checkpoint, "bfloat16")
    talks = [_answered(model, n) for n in range(CONVERSATIONS)]
    for partition, chosen in enumerate((numbers, held)):
        store = PartitionStore.open(
            layout.partition(partition), fingerprint_digest=fingerprint.digest, spec=SPEC,
            shard_bytes=150_000,
        )  # fmt: skip
        for n in chosen:
            context, said, states = talks[n % CONVERSATIONS]
            if n == poison:
                states = states.copy()
                states[len(context), 3] = 0x7FC0
            answer = response(n, context_ids=context, response_ids=said)
            store.add_response(answer)
            ids = np.concatenate([context, said])
            store.add_states(prompt_id(n), 0, ids, len(context), states)
            store.commit()
        store.seal(len(chosen))
        store.close()
    header = ManifestHeader(
        run=root.name, code_version="0.0", fingerprint=fingerprint.digest,
        target={"model": MODEL, "revision": "0"}, sampling={"train": {"temperature": 0.0}},
        settings={"stop_token_ids": [2]},
        states=StatesEntry(
            boundaries=list(BOUNDARIES), final_norm="post", dtype="BF16", hidden_size=HIDDEN,
            codec="plane",
        ),
        servers=[], preflight={},
    )  # fmt: skip
    build_manifest(layout, Plan.open(layout.plan), header)
    return layout.manifest


def _answered(
    model: Llama, number: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]:
    """Context of 4-9 tokens, 6-14 greedy tokens, and the states uint16 [n, W] of both.

    One of a few conversations: what a random model says of them cannot be guessed, but can be learnt.
    """
    rng = np.random.default_rng([number, 1])
    ids = rng.integers(5, 60, rng.integers(4, 10)).tolist()
    n_context = len(ids)
    for _ in range(int(rng.integers(6, 15))):
        ids.append(int(model.logits(model.prefill([ids]).last_BH).argmax()))
    rows_NW = model.prefill([ids], boundaries=BOUNDARIES).rows_NW
    assert rows_NW is not None
    bits = rows_NW.contiguous().view(torch.int16).numpy().view(np.uint16).copy()
    whole = np.array(ids, dtype=np.int32)
    return whole[:n_context], whole[n_context:], bits
