"""A partition's files as one store: rows go in, outcomes come out, nothing is half-kept.

`commit` is the only point of durability: data files first, the journal after them. Rows added since
the last commit may be lost by a kill; opening again shows exactly the committed ones.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datagen.errors import CorruptFile
from datagen.store import responses as responses_format
from datagen.store import states as states_format
from datagen.store.arrow_part import sha256_of
from datagen.store.atomic import make_directory
from datagen.store.codecs import Encoded
from datagen.store.encoder import Encoder
from datagen.store.journal import Entry, Journal, Kind
from datagen.store.layout import PartitionLayout, part
from datagen.store.rejections import Rejection, RejectionLog, read_rejections
from datagen.store.responses import Response, ResponsesReader
from datagen.store.seal import PartitionSummary as PartitionSummary
from datagen.store.series import Series
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


class PartitionStore:
    """Single-threaded: every call belongs to one writer thread, `encode` alone to any."""

    def __init__(
        self, layout: PartitionLayout, digest: str, spec: StatesSpec, shard_bytes: int,
        clock: Callable[[], float], encoder: Encoder | None,
    ) -> None:  # fmt: skip
        self._layout, self._digest, self._spec = layout, digest, spec
        self._shard_bytes, self._clock, self._opened_at = shard_bytes, clock, clock()
        self._responded: dict[Key, tuple[int, int]] = {}
        self._collected: dict[Key, int] = {}
        self._rejected: dict[Key, str] = {}
        self._entries: list[Entry] = []
        self._params = b""
        self._said: list[Response] = []
        """Responses of the next commit: they become one batch, for a batch a row costs 0.3 ms."""
        self.encode = encoder or Encoder(spec)
        """Rows uint16 [n, W] to what `add_states` takes; pure, and the one part for any thread."""
        self._broken: BaseException | None = None
        self._read: tuple[int, ResponsesReader] | None = None
        self._responses, self._states = Series(layout.responses), Series(layout.states)
        self._journal, records = Journal.open(layout.journal, digest)
        try:
            self._replay(records)
            ends = records["end"][records["kind"] == Kind.REJECTED]
            self._rejections = RejectionLog.open(
                layout.rejected, end=int(ends[-1]) if len(ends) else 0
            )
        except BaseException:
            self._journal.close()
            raise

    @classmethod
    def open(
        cls,
        layout: PartitionLayout,
        *,
        fingerprint_digest: str,
        spec: StatesSpec,
        shard_bytes: int,
        clock: Callable[[], float] = time.time,
        encoder: Encoder | None = None,
    ) -> PartitionStore:
        """Open or create, recovering what a killed writer left. Raises CorruptFile, StorageFull.

        `encoder`: shared by the partitions of a run, or the store's own.
        """
        make_directory(layout.root)
        return cls(layout, fingerprint_digest, spec, shard_bytes, clock, encoder)

    def _replay(self, records: NDArray[np.void]) -> None:
        """Outcomes from the journal, and the files brought to what it says."""
        promised: dict[Kind, dict[int, list[int]]] = {Kind.RESPONSE: {}, Kind.STATES: {}}
        count = int((records["kind"] == Kind.REJECTED).sum())
        rejections = read_rejections(self._layout.rejected, count)
        for number, record in enumerate(records):
            kind, file, tokens = Kind(record["kind"]), int(record["file"]), int(record["tokens"])
            key = (bytes(record["prompt_id"]).hex(), int(record["turn"]))
            if kind is Kind.REJECTED:
                entry = next(rejections)
                if entry.sample_id != f"{key[0]}-{key[1]}":
                    raise CorruptFile(
                        f"{entry.sample_id} where the journal has {key[0]}-{key[1]}",
                        where=self._layout.rejected,
                    )
                self._rejected[key] = entry.reason
            elif kind is Kind.RETRY:
                self._rejected.pop(key, None)
            else:
                if key in (self._responded if kind is Kind.RESPONSE else self._collected):
                    raise CorruptFile(
                        f"record {number}: sample {key[0]}-{key[1]} stands twice",
                        where=self._layout.journal,
                    )
                ends = promised[kind].setdefault(file, [])
                ends.append(int(record["end"]))
                if kind is Kind.RESPONSE:
                    self._responded[key] = (file, len(ends) - 1)
                    self._responses.tokens[file] += tokens
                else:
                    self._collected[key] = file
                    self._states.tokens[file] += tokens
        self._responses.recover(self._layout.numbers("responses"), promised[Kind.RESPONSE])
        self._states.recover(self._layout.numbers("states"), promised[Kind.STATES])

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
        if number == self._responses.number:
            self.commit()  # the row may still be in the open file's buffer
        if number == self._responses.number:
            return ResponsesReader(part(path), end=self._responses.open_bytes)[row]
        if self._read is None or self._read[0] != number:
            self._read = (number, ResponsesReader(path))
        return self._read[1][row]

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
        self._responded[key] = (
            self._responses.number,
            self._responses.open_rows + len(self._said),
        )
        self._said.append(response)

    def add_states(
        self,
        prompt_id: str,
        turn: int,
        input_ids: NDArray[np.int32],
        n_context: int,
        states: Encoded | NDArray[np.uint16],
    ) -> None:
        """Store a sample's states, row i of token i: what `encode` made of them, or the rows."""
        key = (prompt_id, turn)
        if key in self._collected:
            raise ValueError(f"sample {prompt_id}-{turn} has states already")
        shape = states.shape
        if shape != (len(input_ids), self._spec.width) or not 0 < n_context < len(input_ids):
            raise ValueError(f"{shape} rows, context {n_context}, for {len(input_ids)} tokens")
        encoded = states if isinstance(states, Encoded) else self.encode(states)
        if self._states.open_rows and encoded.params != self._params:
            if encoded.params == self.encode.params:
                self.commit()
                with self._sound():
                    self._states.roll()  # a shard has one set of parameters: these are the better
            else:
                encoded = self.encode.again(encoded, self._params)
        self._params = encoded.params

        def batch(schema: pa.Schema) -> pa.RecordBatch:
            return states_format.to_batch(
                schema, prompt_id=prompt_id, turn=turn, input_ids=input_ids,
                n_context=n_context, encoded=encoded,
            )  # fmt: skip

        with self._sound():
            _, end = self._states.append(
                lambda: self._spec.schema(encoded.params), batch, len(input_ids)
            )
        number = self._states.number
        self._note(Kind.STATES, key, number, end, len(input_ids), 1)
        self._collected[key] = number

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
        with self._sound():
            if self._entries or self._said:
                self._flush_responses()
                self._responses.sync()
                self._states.sync()
                self._rejections.sync()
                for entry in self._entries:
                    self._journal.append(entry)
                self._journal.sync()
                self._entries.clear()
            for series in (self._responses, self._states):
                if series.open_bytes >= self._shard_bytes:
                    series.roll()

    def seal(self, n_prompts: int) -> PartitionSummary:
        """Commit, close every file, and write partition.json: nothing is added afterwards."""
        self.commit()
        with self._sound():
            self._responses.roll()
            self._states.roll()
        rejections = self._layout.rejected
        summary = PartitionSummary(
            fingerprint=self._digest,
            prompts=n_prompts,
            collected=len(self._collected.keys() - self._rejected.keys()),
            rejected=dict(Counter(self._rejected.values())),
            tokens_generated=self._responses.tokens.total(),
            tokens_captured=self._states.tokens.total(),
            responses=self._responses.files(),
            states=self._states.files(),
            journal_sha256=sha256_of(self._layout.journal),
            rejections_sha256=sha256_of(rejections) if rejections.exists() else None,
            opened_at=self._opened_at,
            sealed_at=self._clock(),
        )
        summary.save(self._layout.summary)
        return summary

    def close(self) -> None:
        """Let go of the files; what was not committed is dropped."""
        self._responses.abandon()
        self._states.abandon()
        self._rejections.close()
        self._journal.close()

    # -- inside --------------------------------------------------------------------------------

    def _flush_responses(self) -> None:
        """Write the waiting responses; their records go before any other, states being their due."""
        if not self._said:
            return
        said, self._said = self._said, []
        _, end = self._responses.append(
            lambda: responses_format.SCHEMA,
            lambda _: responses_format.to_batch(said),
            sum(len(r.response_ids) for r in said),
        )
        number = self._responses.number
        self._entries[:0] = [
            self._entry(
                Kind.RESPONSE, (r.prompt_id, r.turn), number, end, len(r.response_ids), r.attempts
            )
            for r in said
        ]

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """A failed write may leave half a row: the first error answers every later call."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except BaseException as e:
            self._broken = e
            raise

    def _note(self, kind: Kind, key: Key, file: int, end: int, tokens: int, attempts: int) -> None:
        self._entries.append(self._entry(kind, key, file, end, tokens, attempts))

    def _entry(
        self, kind: Kind, key: Key, file: int, end: int, tokens: int, attempts: int
    ) -> Entry:
        time_ms = int(self._clock() * 1000)
        return Entry(kind, key[0], key[1], file, end, tokens, attempts, time_ms)
