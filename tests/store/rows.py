"""Rows that look like a target's: gaussian states with a scale of their own per channel."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import PartitionLayout, RunLayout
from datagen.store.manifest import Manifest, ManifestHeader, StatesEntry, build_manifest
from datagen.store.partition import PartitionStore
from datagen.store.plan import Plan, PlannedPrompt, write_plan
from datagen.store.responses import Response
from datagen.store.states import StatesSpec

SPEC = StatesSpec(
    boundaries=(1, 3, 4), final_norm="post", dtype="BF16", hidden_size=16, codec="plane"
)
DIGEST = "ab" * 32
SHARD_BYTES = 1 << 30
MASTER_SEED = 7


def prompt_id(number: int) -> str:
    return hashlib.sha256(f"prompt {number}".encode()).hexdigest()


def states_like(
    n_tokens: int, *, seed: int = 0, spec: StatesSpec = SPEC, massive: bool = True
) -> NDArray[np.uint16]:
    """bf16 bit patterns uint16 [n_tokens, W]: gaussian, log-normal channel scales, one outlier."""
    scales = np.random.default_rng(MASTER_SEED).lognormal(1.0, 0.6, spec.width).astype(np.float32)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n_tokens, spec.width), dtype=np.float32) * scales
    if massive:
        values[0, 0] = 24_832.0
    bits: NDArray[np.uint32] = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def response(number: int, turn: int = 0, **changes: Any) -> Response:
    """A deterministic response of prompt `number`, of its own length."""
    rng = np.random.default_rng([number, turn])
    context, said = int(rng.integers(3, 12)), int(rng.integers(2, 20))
    fields: dict[str, Any] = {
        "prompt_id": prompt_id(number),
        "turn": turn,
        "context_ids": rng.integers(5, 500, context).astype(np.int32),
        "response_ids": np.append(rng.integers(5, 500, said - 1), 2).astype(np.int32),
        "text": f"answer {number}.{turn} \N{SNOWMAN}",
        "finish_reason": "stop",
        "stop_reason_detail": "2",
        "prompt_tokens": context,
        "completion_tokens": said,
        "cached_tokens": 0,
        "num_retractions": 0,
        "spec_verify_ct": None,
        "seed": number,
        "endpoint": "http://127.0.0.1:30000",
        "attempts": 1,
        "queue_s": 0.25,
        "server_s": 1.5,
    }
    return Response(**(fields | changes))


def states_of(answer: Response, spec: StatesSpec = SPEC) -> NDArray[np.uint16]:
    """The states of a response's sample, a function of the sample alone."""
    n_tokens = len(answer.context_ids) + len(answer.response_ids)
    seed = int(answer.prompt_id[:8], 16) + answer.turn
    return states_like(n_tokens, seed=seed, spec=spec)


def ids_of(answer: Response) -> NDArray[np.int32]:
    return np.concatenate([answer.context_ids, answer.response_ids])


def collect(store: PartitionStore, number: int, turn: int = 0) -> None:
    """Response and states of one sample, without a commit; what is there already is left."""
    answer = response(number, turn)
    if not store.has_response(answer.prompt_id, turn):
        store.add_response(answer)
    if store.outcome(answer.prompt_id, turn).value == "responded":
        store.add_states(
            answer.prompt_id, turn, ids_of(answer), len(answer.context_ids), states_of(answer)
        )


def reject(store: PartitionStore, number: int, reason: str = "over_context") -> None:
    store.add_rejection(prompt_id(number), 0, "generate", reason, "too long by 7 tokens", 2)


def open_store(
    root: Path, *, shard_bytes: int = SHARD_BYTES, digest: str = DIGEST
) -> PartitionStore:
    return PartitionStore.open(
        PartitionLayout(root),
        fingerprint_digest=digest,
        spec=SPEC,
        shard_bytes=shard_bytes,
        clock=lambda: 1_700_000_000.0,
    )


def planned(number: int, *, partition: int = 0, split: str = "train", turns: int = 1,
            **changes: Any) -> PlannedPrompt:  # fmt: skip
    fields: dict[str, Any] = {
        "prompt_id": prompt_id(number),
        "messages": f'[{{"content":"question {number}","role":"user"}}]',
        "tools": None,
        "thinking": None,
        "split": split,
        "n_turns": turns,
        "prompt_tokens": 12,
        "max_new_tokens": 64,
        "source": "made-up",
        "category": None,
        "language": "en",
        "licence": "CC0-1.0",
        "partition": partition,
    }
    return PlannedPrompt(**(fields | changes))


REJECTED = 3  # the prompt of every test run that is rejected


def prepare_run(root: Path, *, partitions: int = 2, prompts: int = 4) -> tuple[RunLayout, Plan]:
    """A frozen plan and its fingerprint; the last partition is the held-out split."""
    root.mkdir(parents=True)
    layout = RunLayout(root)
    rows = [
        planned(
            p * prompts + i,
            partition=p,
            split="heldout" if p == partitions - 1 else "train",
            turns=2 if i == 0 else 1,
        )
        for p in range(partitions)
        for i in range(prompts)
    ]
    digest = write_plan(layout.plan, rows, {"mix": "made-up"})
    Fingerprint({"plan": digest, "target": {"model": "tiny"}, "settings": {"seed": 0}}).save(
        layout.fingerprint
    )
    return layout, Plan.open(layout.plan)


def collect_partition(layout: RunLayout, plan: Plan, index: int, *, seal: bool = True,
                      limit: int | None = None, shard_bytes: int = 4096) -> None:  # fmt: skip
    """Bring the samples of a partition to an outcome; `limit`: stop after so many prompts."""
    digest = Fingerprint.load(layout.fingerprint).digest
    store = open_store(layout.partition(index).root, digest=digest, shard_bytes=shard_bytes)
    numbers = {prompt_id(n): n for n in range(1000)}
    prompts = plan.partition(index)[:limit]
    for prompt in prompts:
        number = numbers[prompt.prompt_id]
        for turn in range(prompt.n_turns):
            if number == REJECTED:
                reject(store, number)
            else:
                collect(store, number, turn)
        store.commit()
    if seal:
        store.seal(len(prompts))
    store.close()


def header(layout: RunLayout) -> ManifestHeader:
    return ManifestHeader(
        run=layout.root.name,
        code_version="0.0",
        fingerprint=Fingerprint.load(layout.fingerprint).digest,
        target={"model": "tiny"},
        sampling={"train": {"temperature": 1.0}},
        settings={"seed": 0},
        states=StatesEntry(
            boundaries=list(SPEC.boundaries),
            final_norm="post",
            dtype=SPEC.dtype,
            hidden_size=SPEC.hidden_size,
            codec=SPEC.codec,
        ),
        servers=[],
        preflight={},
    )


def complete_run(root: Path, *, partitions: int = 2, prompts: int = 4) -> Manifest:
    layout, plan = prepare_run(root, partitions=partitions, prompts=prompts)
    for index in range(partitions):
        collect_partition(layout, plan, index)
    return build_manifest(layout, plan, header(layout))
