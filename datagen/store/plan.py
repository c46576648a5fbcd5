"""plan.arrow: the frozen prompts of a run, in order, cut into partitions.

An Arrow IPC file without compression, memory-mapped. One row per prompt; columns:
    prompt_id string (64 hex)     messages large_string (JSON)     tools large_string? (JSON)
    thinking bool?   split string   n_turns int32   prompt_tokens int32   max_new_tokens int32
    source string   category string?   language string?   licence string   partition int32
Schema metadata: format, digest (sha256 over the ordered content), and the caller's own strings.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from datagen.errors import CorruptFile
from datagen.store.atomic import replace_durably, storage_errors
from datagen.store.files import open_file
from datagen.store.fingerprint import canonical_json

FORMAT = "datagen.plan.1"
BATCH_ROWS = 4096
RESTORE = "restore it, or use a new run directory"
SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("messages", pa.large_string(), nullable=False),
        pa.field("tools", pa.large_string()),
        pa.field("thinking", pa.bool_()),
        pa.field("split", pa.string(), nullable=False),
        pa.field("n_turns", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("max_new_tokens", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("category", pa.string()),
        pa.field("language", pa.string()),
        pa.field("licence", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt of the plan. `messages`: canonical JSON of the skeleton; `n_turns`: samples it gives."""

    prompt_id: str
    messages: str
    tools: str | None
    thinking: bool | None
    split: str
    n_turns: int
    prompt_tokens: int
    max_new_tokens: int
    source: str
    category: str | None
    language: str | None
    licence: str
    partition: int


NAMES = tuple(f.name for f in fields(PlannedPrompt))


def write_plan(path: Path, rows: Iterable[PlannedPrompt], metadata: dict[str, str]) -> str:
    """Freeze `rows` in order; returns the digest. Streams: memory does not grow with the rows.

    Raises ValueError when partitions are not numbered 0, 1, 2 ... in order, or one straddles splits.
    """
    temporary, unsigned = (path.with_name(path.name + end) for end in (".tmp", ".unsigned.tmp"))
    digest = hashlib.sha256()
    with storage_errors(path):
        try:
            # The digest stands in the schema, and the schema comes first: hence two passes.
            _write(unsigned, SCHEMA, _batches(_in_order(rows), digest))
            stored = pa.ipc.open_file(pa.memory_map(str(unsigned)))
            signed = {"format": FORMAT, "digest": digest.hexdigest(), **metadata}
            schema = SCHEMA.with_metadata(signed)
            count = stored.num_record_batches
            _write(temporary, schema, (stored.get_batch(i) for i in range(count)))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            unsigned.unlink(missing_ok=True)
        replace_durably(temporary, path)
    return digest.hexdigest()


def _write(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with open(path, "wb") as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        sink.flush()
        os.fsync(sink.fileno())


def _in_order(rows: Iterable[PlannedPrompt]) -> Iterator[PlannedPrompt]:
    partition, split = -1, ""
    for row in rows:
        if row.partition == partition + 1:
            partition, split = row.partition, row.split
        if (row.partition, row.split) != (partition, split):
            raise ValueError(
                f"prompt {row.prompt_id}: partition {row.partition} of {row.split} cannot follow "
                f"partition {partition} of {split}"
            )
        yield row


def _batches(rows: Iterator[PlannedPrompt], digest: Any) -> Iterator[pa.RecordBatch]:
    while block := list(islice(rows, BATCH_ROWS)):
        for row in block:
            digest.update(canonical_json([getattr(row, n) for n in NAMES]) + b"\n")
        columns = [
            pa.array([getattr(row, field.name) for row in block], type=field.type)
            for field in SCHEMA
        ]
        yield pa.record_batch(columns, schema=SCHEMA)


class Plan:
    """A frozen plan. Holds an index of the partitions; rows are read when asked for."""

    def __init__(self, path: Path, table: pa.Table, digest: str, metadata: dict[str, str]) -> None:
        self._path, self._table = path, table
        self.digest, self.metadata = digest, metadata
        partition = table.column("partition").to_numpy()
        self.n_prompts = table.num_rows
        self.n_samples = int(table.column("n_turns").to_numpy().sum())
        steps = np.diff(partition, prepend=-1)
        if ((steps < 0) | (steps > 1)).any() or (self.n_prompts and partition[0] != 0):
            raise CorruptFile("its partitions are not in order", where=path, fix=RESTORE)
        self.n_partitions = int(partition[-1]) + 1 if len(partition) else 0
        self._starts = np.searchsorted(partition, np.arange(self.n_partitions + 1))

    @classmethod
    def open(cls, path: Path) -> Plan:
        """Map the file; raises CorruptFile."""
        try:
            table = pa.ipc.open_file(open_file(path)).read_all()
            raw = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        except (OSError, pa.ArrowException, UnicodeDecodeError) as e:
            raise CorruptFile(f"no plan can be read: {e}", where=path, fix=RESTORE) from e
        if raw.pop("format", None) != FORMAT or not table.schema.equals(SCHEMA):
            raise CorruptFile(f"the file is no {FORMAT}", where=path, fix=RESTORE)
        if any(table.column(name).null_count for name in ("partition", "n_turns")):
            raise CorruptFile("a row has no partition or no turns", where=path, fix=RESTORE)
        return cls(path, table, raw.pop("digest", ""), raw)

    def partition(self, index: int) -> list[PlannedPrompt]:
        """The prompts of one partition, in order. Raises CorruptFile."""
        start, stop = int(self._starts[index]), int(self._starts[index + 1])
        try:
            part = self._table.slice(start, stop - start)
            part.validate(full=True)
            rows = part.to_pylist()
        except (pa.ArrowException, ValueError) as e:
            raise CorruptFile(f"rows {start} to {stop}: {e}", where=self._path, fix=RESTORE) from e
        return [PlannedPrompt(**row) for row in rows]

    def split_of_partition(self, index: int) -> str:
        """The one split of a partition."""
        try:
            return str(self._table.column("split")[int(self._starts[index])].as_py())
        except ValueError as e:
            raise CorruptFile(f"partition {index}: {e}", where=self._path, fix=RESTORE) from e

    def rows(self) -> Iterator[PlannedPrompt]:
        """Every prompt, one partition in memory at a time."""
        for index in range(self.n_partitions):
            yield from self.partition(index)

    def recomputed_digest(self) -> str:
        """The digest of the content as it is now."""
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(canonical_json([getattr(row, n) for n in NAMES]) + b"\n")
        return digest.hexdigest()

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of all prompts."""
        return self._table.column(name)
