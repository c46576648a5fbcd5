"""One sample of a run, wherever it stands: found through the plan and the journal, sealed or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile, NoSuchSample
from datagen.store.fingerprint import Fingerprint
from datagen.store.guards import layer_name, row_norms
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import PartitionLayout, RunLayout, part
from datagen.store.plan import Plan
from datagen.store.rejections import Rejection
from datagen.store.responses import Response, ResponsesReader
from datagen.store.retry import current_rejections
from datagen.store.states import SampleColumns, ShardReader

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """L2 norms of one layer over a sample's tokens. `largest_at`: the token of the largest."""

    name: str
    median: float
    supervised_median: float
    smallest: float
    largest: float
    largest_at: int


@dataclass(frozen=True, slots=True)
class StoredSample:
    """What the disk holds of a sample; None for what it does not hold."""

    sample_id: str
    split: str
    partition: int
    response: Response | None
    columns: SampleColumns | None
    norms: list[LayerNorms]
    shard: str | None
    stored_bytes: int
    rejection: Rejection | None


@dataclass(frozen=True, slots=True)
class SampleLine:
    """A sample in a list."""

    sample_id: str
    split: str
    context: int
    answer: int
    finish_reason: str
    has_states: bool
    text: str


class _Places:
    """Where the rows of a partition lie, by its journal: kind, key -> (file number, row)."""

    def __init__(self, layout: PartitionLayout, digest: str) -> None:
        self._layout = layout
        self._ends: dict[tuple[Kind, int], int] = {}
        self.at: dict[Kind, dict[Key, tuple[int, int]]] = {Kind.RESPONSE: {}, Kind.STATES: {}}
        rows: dict[tuple[Kind, int], int] = {}
        for record in read_journal(layout.journal, digest):
            kind = Kind(record["kind"])
            if kind not in self.at:
                continue
            file = (kind, int(record["file"]))
            key = (bytes(record["prompt_id"]).hex(), int(record["turn"]))
            self.at[kind][key] = (file[1], rows.get(file, 0))
            rows[file] = rows.get(file, 0) + 1
            self._ends[file] = int(record["end"])

    def responses(self, number: int) -> ResponsesReader:
        path = self._layout.responses(number)
        if path.exists():
            return ResponsesReader(path)
        return ResponsesReader(part(path), end=self._ends[Kind.RESPONSE, number])

    def shard(self, number: int) -> ShardReader:
        path = self._layout.states(number)
        if path.exists():
            return ShardReader(path)
        return ShardReader(part(path), end=self._ends[Kind.STATES, number])


def open_sample(layout: RunLayout, name: str) -> StoredSample:
    """The sample named by its id, or by the beginning of its prompt's: `4f1c`, `4f1c-1`.

    Raises NoSuchSample, CorruptFile.
    """
    plan = Plan.open(layout.plan)
    digest = Fingerprint.load(layout.fingerprint).digest
    prompt_id, turn, index = _named(plan, name, layout)
    partition = layout.partition(index)
    places, key = _Places(partition, digest), (prompt_id, turn)
    response, columns, shard_name, stored = None, None, None, 0
    norms: list[LayerNorms] = []
    if key in places.at[Kind.RESPONSE]:
        number, row = places.at[Kind.RESPONSE][key]
        response = places.responses(number)[row]
    if key in places.at[Kind.STATES]:
        number, row = places.at[Kind.STATES][key]
        shard = places.shard(number)
        columns = shard.columns(row)
        norms = _norms(shard, row, columns.loss_mask)
        shard_name, stored = f"partitions/{index:05d}/states-{number:03d}", shard.stored_bytes(row)
    return StoredSample(
        sample_id=f"{prompt_id}-{turn}",
        split=plan.split_of_partition(index),
        partition=index,
        response=response,
        columns=columns,
        norms=norms,
        shard=None if shard_name is None else f"{shard_name} row {row}",
        stored_bytes=stored,
        rejection=current_rejections(partition, digest).get(key),
    )


def _named(plan: Plan, name: str, layout: RunLayout) -> tuple[str, int, int]:
    beginning, dash, turn = name.partition("-")
    ids = plan.column("prompt_id").to_pylist()
    found = [n for n, prompt_id in enumerate(ids) if beginning and prompt_id.startswith(beginning)]
    wrong = bool(dash) and not (turn.isascii() and turn.isdecimal())
    if len(found) != 1 or wrong:
        raise NoSuchSample(
            f"'{name}' names {len(found) if not wrong else 'no'} samples of the plan",
            where=layout.root,
            fix="give more of its id; `datagen inspect RUN` lists them",
        )
    row, number = found[0], int(turn or 0)
    if number >= plan.column("n_turns")[row].as_py():
        raise NoSuchSample(
            f"prompt {ids[row]} has no turn {number}", where=layout.root, fix="turns count from 0"
        )
    return ids[row], number, int(plan.column("partition")[row].as_py())


def _norms(shard: ShardReader, row: int, mask: NDArray[np.int8]) -> list[LayerNorms]:
    norms_TL = row_norms(shard.states(row), shard.spec.dtype)
    if len(norms_TL) != len(mask):
        raise CorruptFile(f"{len(norms_TL)} rows of states, {len(mask)} of the mask")
    found = []
    for layer in range(shard.spec.n_layers):
        norms_T = norms_TL[:, layer]
        found.append(
            LayerNorms(
                name=layer_name(shard.spec, layer),
                median=float(np.median(norms_T)),
                supervised_median=float(np.median(norms_T[mask == 1])) if mask.any() else 0.0,
                smallest=float(norms_T.min()),
                largest=float(norms_T.max()),
                largest_at=int(norms_T.argmax()),
            )
        )
    return found


def samples_of(layout: RunLayout) -> Iterator[SampleLine]:
    """Every sample with a response, in the order of its files. Raises CorruptFile."""
    plan = Plan.open(layout.plan)
    digest = Fingerprint.load(layout.fingerprint).digest
    for index in range(plan.n_partitions):
        places, split = _Places(layout.partition(index), digest), plan.split_of_partition(index)
        readers: dict[int, ResponsesReader] = {}
        for key, (number, row) in places.at[Kind.RESPONSE].items():
            if number not in readers:
                readers[number] = places.responses(number)
            answer = readers[number][row]
            yield SampleLine(
                sample_id=answer.sample_id,
                split=split,
                context=len(answer.context_ids),
                answer=len(answer.response_ids),
                finish_reason=answer.finish_reason,
                has_states=key in places.at[Kind.STATES],
                text=answer.text,
            )


def rejections_of(layout: RunLayout) -> dict[str, list[Rejection]]:
    """Reason -> the rejections that stand, in plan order of their partitions. Raises CorruptFile."""
    found: dict[str, list[Rejection]] = {}
    digest = Fingerprint.load(layout.fingerprint).digest
    for index in range(Plan.open(layout.plan).n_partitions):
        for rejection in current_rejections(layout.partition(index), digest).values():
            found.setdefault(rejection.reason, []).append(rejection)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
