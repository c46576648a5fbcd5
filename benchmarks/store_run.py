"""Finished runs on disk for the store's benchmark, written by the store itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datagen.store.encoder import Encoder
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import ManifestHeader, StatesEntry, build_manifest
from datagen.store.partition import PartitionStore
from datagen.store.plan import Plan, PlannedPrompt, write_plan
from datagen.store.responses import Response
from datagen.store.states import StatesSpec

Sample = tuple[NDArray[np.int32], int, NDArray[np.uint16]]
"""Ids, context length, rows."""


def write_run(
    root: Path, spec: StatesSpec, samples: Iterable[Sample], n: int, per_partition: int = 1000
) -> Path:
    """A run of `n` samples in the train split, sealed; returns the path of its manifest."""
    layout = RunLayout(root)
    root.mkdir(parents=True)
    ids = [hashlib.sha256(f"benchmark {i}".encode()).hexdigest() for i in range(n)]
    digest = write_plan(
        layout.plan, [_planned(p, i // per_partition) for i, p in enumerate(ids)], {}
    )
    Fingerprint({"plan": digest, "target": {}, "settings": {}}).save(layout.fingerprint)
    fingerprint = Fingerprint.load(layout.fingerprint).digest
    encoder = Encoder(spec, refit_after=8)
    found = iter(samples)
    for first in range(0, n, per_partition):
        mine = ids[first : first + per_partition]
        store = PartitionStore.open(
            layout.partition(first // per_partition), fingerprint_digest=fingerprint,
            spec=spec, shard_bytes=256 << 20, encoder=encoder,
        )  # fmt: skip
        for number, prompt_id in enumerate(mine, start=1):
            input_ids, n_context, rows = next(found)
            store.add_response(_response(prompt_id, input_ids, n_context))
            store.add_states(prompt_id, 0, input_ids, n_context, rows)
            if number % 200 == 0:
                store.commit()
        store.seal(len(mine))
        store.close()
    states = StatesEntry(
        boundaries=list(spec.boundaries), final_norm="post", dtype=spec.dtype,
        hidden_size=spec.hidden_size, codec=spec.codec,
    )  # fmt: skip
    header = ManifestHeader(
        run=root.name, code_version="benchmark", fingerprint=fingerprint, target={}, sampling={},
        settings={}, states=states, servers=[], preflight={},
    )  # fmt: skip
    build_manifest(layout, Plan.open(layout.plan), header)
    return layout.manifest


def _planned(prompt_id: str, partition: int) -> PlannedPrompt:
    return PlannedPrompt(
        prompt_id=prompt_id, messages='[{"content":"a question","role":"user"}]', tools=None,
        thinking=None, split="train", n_turns=1, prompt_tokens=12, max_new_tokens=64,
        source="benchmark", category=None, language="en", licence="CC0-1.0", partition=partition,
    )  # fmt: skip


def _response(prompt_id: str, ids: NDArray[np.int32], n_context: int) -> Response:
    return Response(
        prompt_id=prompt_id, turn=0, context_ids=ids[:n_context], response_ids=ids[n_context:],
        text="", finish_reason="stop", stop_reason_detail=None, prompt_tokens=n_context,
        completion_tokens=len(ids) - n_context, cached_tokens=0, num_retractions=0,
        spec_verify_ct=None, seed=None, endpoint="http://127.0.0.1", attempts=1, queue_s=0.0,
        server_s=0.0,
    )  # fmt: skip
