"""A partition's files as one store: rows go in, outcomes come out, nothing is half-kept.

`commit` is the only point of durability: data files first, the journal after them. Rows added since
the last commit may be lost by a kill; opening again shows exactly the committed ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from datagen.errors import CorruptFile
from datagen.store import responses as responses_format
from datagen.store import states as states_format
from datagen.store.arrow_part import ArrowPart, SealedFile, open_batches, recover, sha256_of
from datagen.store.atomic import write_json_atomic
from datagen.store.journal import Entry, Journal, Kind
from datagen.store.layout import PartitionLayout, part
from datagen.store.rejections import Rejection, RejectionLog
from datagen.store.responses import Response
from datagen.store.states import StatesSpec

Key = tuple[str, int]


class Outcome(Enum):
    """Where a sample stands."""

    PENDING = "pending"
    RESPONDED = "responded"
    COLLECTED = "collected"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Counts:
    """Samples by outcome; what is not counted is pending."""

    responded: int
    collected: int
    rejects: dict[str, int]


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A sealed file as the partition's seal describes it."""

    name: str
    rows: int
    tokens: int
    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """partition.json. `rejected`: by reason; times in Unix seconds."""

    fingerprint: str
    prompts: int
    collected: int
    rejected: dict[str, int]
    tokens_generated: int
    tokens_captured: int
    responses: list[FileSummary]
    states: list[FileSummary]
    journal_sha256: str
    rejections_sha256: str | None
    opened_at: float
    sealed_at: float

    @classmethod
    def load(cls, path: Path) -> PartitionSummary:
        """Read a seal; raises CorruptFile."""
        try:
            data: dict[str, Any] = orjson.loads(path.read_bytes())
            for kind in ("responses", "states"):
                data[kind] = [FileSummary(**f) for f in data[kind]]
            return cls(**data)
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as e:
            raise CorruptFile(f"no partition seal: {e!r}", where=path) from e


@dataclass(slots=True)
class _Series:
    """The numbered files of one kind."""

    kind: Kind
    name: str
    path_of: Callable[[int], Path]
    open: ArrowPart | None = None
    number: int = 0
    sealed: dict[int, SealedFile] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)


class PartitionStore:
    """Single-threaded; every call belongs to one writer thread."""

    def __init__(
        self, layout: PartitionLayout, digest: str, spec: StatesSpec, shard_bytes: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._layout, self._digest, self._spec, self._shard_bytes = (
            layout,
            digest,
            spec,
            shard_bytes,
        )
        self._clock, self._opened_at = clock, clock()
        self._journal, self._records = Journal.open(layout.journal, digest)
        ends = self._records["end"][self._records["kind"] == Kind.REJECTED]
        self._rejections = RejectionLog.open(layout.rejected, end=int(ends[-1]) if len(ends) else 0)
        self._responded: dict[Key, tuple[int, int]] = {}
        self._collected: dict[Key, int] = {}
        self._rejected: dict[Key, str] = {}
        self._entries: list[Entry] = []
        self._params: bytes | None = None
        self._responses = _Series(Kind.RESPONSE, "responses", layout.responses)
        self._states = _Series(Kind.STATES, "states", layout.states)

    @classmethod
    def open(
        cls,
        layout: PartitionLayout,
        *,
        fingerprint_digest: str,
        spec: StatesSpec,
        shard_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> PartitionStore:
        """Open or create, recovering what a killed writer left. Raises CorruptFile, StorageFull."""
        layout.root.mkdir(parents=True, exist_ok=True)
        store = cls(layout, fingerprint_digest, spec, shard_bytes, clock)
        by_file = store._replay()
        for series in (store._responses, store._states):
            store._recover(series, by_file)
        return store

    def _replay(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Outcomes from the journal; returns (kind, file) -> (rows, end of the last)."""
        by_file: dict[tuple[int, int], tuple[int, int]] = {}
        reasons = self._rejections.read()
        for record in self._records:
            kind, key = (
                Kind(record["kind"]),
                (bytes(record["prompt_id"]).hex(), int(record["turn"])),
            )
            file, tokens = int(record["file"]), int(record["tokens"])
            if kind is Kind.REJECTED:
                self._rejected[key] = next(reasons).reason
            elif kind is Kind.RETRY:
                self._rejected.pop(key, None)
            else:
                rows = by_file.get((kind, file), (0, 0))[0]
                by_file[kind, file] = (rows + 1, int(record["end"]))
                if kind is Kind.RESPONSE:
                    self._responded[key] = (file, rows)
                    self._responses.tokens[file] += tokens
                else:
                    self._collected[key] = file
                    self._states.tokens[file] += tokens
        self._records = self._records[:0]
        return by_file

    def _recover(self, series: _Series, by_file: dict[tuple[int, int], tuple[int, int]]) -> None:
        numbers = self._layout.numbers(series.name)
        journaled = {n: v for (kind, n), v in by_file.items() if kind == series.kind}
        for number in sorted({*numbers, *journaled}):
            rows, end = journaled.get(number, (0, 0))
            path = series.path_of(number)
            if part(path).exists():
                sealed = recover(path, rows=rows, end=end)
                if sealed is not None:
                    series.sealed[number] = sealed
            if rows and not path.exists():
                raise CorruptFile(
                    f"the file is gone, the journal promises {rows} rows of it", where=path
                )
            if path.exists():
                found = len(open_batches(path))
                if found != rows:
                    raise CorruptFile(f"{found} rows, the journal promises {rows}", where=path)
                series.rows[number] = rows
        series.number = max([-1, *series.rows]) + 1

    # -- reading -------------------------------------------------------------------------------

    def outcome(self, prompt_id: str, turn: int) -> Outcome:
        """Where a sample stands."""
        key = (prompt_id, turn)
        if key in self._rejected:
            return Outcome.REJECTED
        if key in self._collected:
            return Outcome.COLLECTED
        return Outcome.RESPONDED if key in self._responded else Outcome.PENDING

    def has_response(self, prompt_id: str, turn: int) -> bool:
        """True when the target's answer is stored, whatever became of its states."""
        return (prompt_id, turn) in self._responded

    def response(self, prompt_id: str, turn: int) -> Response:
        """A stored response; call it on the writer thread. Raises CorruptFile."""
        number, row = self._responded[prompt_id, turn]
        path = self._layout.responses(number)
        if not path.exists():
            self.commit()  # the row may still be in the open file's buffer
            opened = self._responses.open
            assert opened is not None
            return responses_format.from_batch(open_batches(part(path), end=opened.n_bytes)[row])
        return responses_format.from_batch(open_batches(path)[row])

    def counts(self) -> Counts:
        """Samples by outcome."""
        return Counts(
            responded=len(self._responded),
            collected=len(self._collected.keys() - self._rejected.keys()),
            rejects=dict(Counter(self._rejected.values())),
        )

    # -- writing -------------------------------------------------------------------------------

    def add_response(self, response: Response) -> None:
        """Store what the target answered. A second answer to one row is a programming error."""
        key = (response.prompt_id, response.turn)
        if key in self._responded:
            raise ValueError(f"sample {response.sample_id} has a response already")
        row = self._append(
            self._responses,
            lambda: responses_format.SCHEMA,
            lambda _: responses_format.to_batch(response),
            key,
            len(response.response_ids),
            response.attempts,
        )
        self._responded[key] = (self._responses.number, row)

    def add_states(
        self,
        prompt_id: str,
        turn: int,
        input_ids: NDArray[np.int32],
        n_context: int,
        rows: NDArray[np.uint16],
    ) -> None:
        """Store a sample's states: `rows` uint16 [len(input_ids), (K+1)*H], row i of token i."""
        key = (prompt_id, turn)
        if key in self._collected:
            raise ValueError(f"sample {prompt_id}-{turn} has states already")
        if rows.shape != (len(input_ids), self._spec.width) or not 0 < n_context < len(input_ids):
            raise ValueError(f"{rows.shape} rows, context {n_context}, for {len(input_ids)} tokens")
        spec = self._spec

        def batch(schema: pa.Schema) -> pa.RecordBatch:
            assert self._params is not None
            encoded = states_format.encode(spec, self._params, rows)
            return states_format.to_batch(
                schema, prompt_id=prompt_id, turn=turn, input_ids=input_ids,
                n_context=n_context, encoded=encoded,
            )  # fmt: skip

        def schema() -> pa.Schema:
            self._params = states_format.fit(spec, rows)
            return spec.schema(self._params)

        self._append(self._states, schema, batch, key, len(input_ids), 1)
        self._collected[key] = self._states.number

    def add_rejection(
        self, prompt_id: str, turn: int, stage: str, reason: str, detail: str, attempts: int
    ) -> None:
        """Enter a sample into the books as rejected, with its reason."""
        key = (prompt_id, turn)
        if key in self._rejected:
            raise ValueError(f"sample {prompt_id}-{turn} is rejected already")
        end = self._rejections.append(
            Rejection(f"{prompt_id}-{turn}", stage, reason, detail, attempts)
        )
        self._note(Kind.REJECTED, key, 0, end, 0, attempts)
        self._rejected[key] = reason

    def commit(self) -> None:
        """Make everything added so far durable: data first, then the journal."""
        if not self._entries:
            return
        for series in (self._responses, self._states):
            if series.open is not None:
                series.open.sync()
        self._rejections.sync()
        for entry in self._entries:
            self._journal.append(entry)
        self._journal.sync()
        self._entries.clear()
        for series in (self._responses, self._states):
            if series.open is not None and series.open.n_bytes >= self._shard_bytes:
                self._seal_open(series)

    def seal(self, n_prompts: int) -> PartitionSummary:
        """Commit, close every file, and write partition.json: nothing is added afterwards."""
        self.commit()
        for series in (self._responses, self._states):
            self._seal_open(series)
        rejects = Counter(self._rejected.values())
        rejections = self._layout.rejected
        summary = PartitionSummary(
            fingerprint=self._digest,
            prompts=n_prompts,
            collected=len(self._collected.keys() - self._rejected.keys()),
            rejected=dict(rejects),
            tokens_generated=self._responses.tokens.total(),
            tokens_captured=self._states.tokens.total(),
            responses=self._files(self._responses),
            states=self._files(self._states),
            journal_sha256=sha256_of(self._layout.journal),
            rejections_sha256=sha256_of(rejections) if rejections.exists() else None,
            opened_at=self._opened_at,
            sealed_at=self._clock(),
        )
        write_json_atomic(self._layout.summary, asdict(summary))
        return summary

    def close(self) -> None:
        """Let go of the files; what was not committed is dropped."""
        for series in (self._responses, self._states):
            if series.open is not None:
                series.open.abandon()
                series.open = None
        self._rejections.close()
        self._journal.close()

    # -- inside --------------------------------------------------------------------------------

    def _append(
        self,
        series: _Series,
        schema: Callable[[], pa.Schema],
        batch: Callable[[pa.Schema], pa.RecordBatch],
        key: Key,
        tokens: int,
        attempts: int,
    ) -> int:
        """Write one row to the open file of a series, opening it if need be; returns its row."""
        if series.open is None:
            series.open = ArrowPart(series.path_of(series.number), schema())
        row = series.open.rows
        end = series.open.append(batch(series.open.schema))
        series.tokens[series.number] += tokens
        self._note(series.kind, key, series.number, end, tokens, attempts)
        return row

    def _note(self, kind: Kind, key: Key, file: int, end: int, tokens: int, attempts: int) -> None:
        time_ms = int(self._clock() * 1000)
        self._entries.append(Entry(kind, key[0], key[1], file, end, tokens, attempts, time_ms))

    def _seal_open(self, series: _Series) -> None:
        if series.open is not None:
            series.sealed[series.number] = series.open.seal()
            series.rows[series.number] = series.open.rows
            series.open = None
            series.number += 1

    def _files(self, series: _Series) -> list[FileSummary]:
        found = []
        for number in sorted(series.rows):
            path = series.path_of(number)
            known = series.sealed.get(number)  # sealed by an earlier process: hash it now
            found.append(
                FileSummary(
                    name=path.name,
                    rows=series.rows[number],
                    tokens=series.tokens[number],
                    n_bytes=known.n_bytes if known else path.stat().st_size,
                    sha256=known.sha256 if known else sha256_of(path),
                )
            )
        return found
