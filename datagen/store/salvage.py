"""Good rows out of a damaged data file, each by itself.

A batch is a range of bytes that holds one Arrow message; nothing else of the file is needed to read it
but the schema, which an Arrow file holds twice. Its rows are good when its bytes have the digest they
were written with; where none is known, when everything about it can be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import xxhash

from datagen.errors import CorruptFile
from datagen.store.arrow_batches import MAGIC_BYTES
from datagen.store.arrow_message import require_sizes
from datagen.store.arrow_part import ArrowPart, SealedFile
from datagen.store.files import open_file
from datagen.store.responses import ResponsesReader
from datagen.store.states import ShardReader


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file of `responses` or `states`, sealed or open. `row_xxh3` is empty when none are known."""

    kind: str
    path: Path
    row_ends: Sequence[int]
    row_xxh3: Sequence[str]

    def good_rows(self) -> dict[int, pa.RecordBatch]:
        """Row number -> a batch of that row alone, of the rows that are as they were written."""
        try:
            raw = open_file(self.path).read_buffer()
        except (OSError, pa.ArrowException):  # gone, or empty
            return {}
        spans = {
            rows: raw.slice(start, end - start)
            for rows, start, end in self._spans()
            if start < end <= raw.size
        }
        if self.row_xxh3:
            spans = {
                rows: span
                for rows, span in spans.items()
                if xxhash.xxh3_64(span).hexdigest() == self.row_xxh3[rows.start]
            }
        first = next((rows for rows in spans if rows.start == 0), None)
        head, schema = self._schema(raw, head_is_good=bool(self.row_xxh3) and first is not None)
        if schema is None:
            return {}
        if first is not None and head is not None:
            spans[first] = spans[first].slice(head)
        found: dict[int, pa.RecordBatch] = {}
        for rows, span in spans.items():
            try:
                message = pa.ipc.read_message(span)
                body = message.body
                require_sizes(message.metadata, body.slice, body.size)
                batch = pa.ipc.read_record_batch(message, schema)
                batch.validate(full=True)
            except (pa.ArrowException, OSError, ValueError):
                continue  # not good: its samples are collected again
            if batch.num_rows >= len(rows):  # more, where the journal was cut within its commit
                found |= {row: batch.slice(at, 1) for at, row in enumerate(rows)}
        return found

    def _spans(self) -> Iterator[tuple[range, int, int]]:
        """The rows of each batch, and the bytes from which to which it lies."""
        start = first = 0
        for row, end in enumerate(self.row_ends):
            if row + 1 == len(self.row_ends) or self.row_ends[row + 1] != end:
                yield range(first, row + 1), start, end
                start, first = end, row + 1

    def _schema(self, raw: pa.Buffer, *, head_is_good: bool) -> tuple[int | None, pa.Schema | None]:
        """Where the first row begins, and the schema: the one at the head, unless head and end differ."""
        head = tail = begins = None
        with contextlib.suppress(pa.ArrowException, OSError, ValueError):  # the copy at the end?
            source = pa.BufferReader(raw.slice(MAGIC_BYTES))
            head = pa.ipc.read_schema(pa.ipc.read_message(source))
            begins = MAGIC_BYTES + source.tell()
        if head_is_good:
            return begins, head
        with contextlib.suppress(
            pa.ArrowException, OSError, ValueError
        ):  # damaged, or not yet there
            tail = pa.ipc.open_file(pa.BufferReader(raw)).schema
        unsealed = not self.row_xxh3 and tail is None
        if head is not None and (unsealed or (tail and head.equals(tail, check_metadata=True))):
            return begins, head
        return begins, None


def write_rows(
    kind: str, path: Path, rows: dict[int, pa.RecordBatch]
) -> tuple[SealedFile, list[int]]:
    """A new sealed file of these rows, in order; returns it and the row numbers it holds.

    Rows that a reader of `kind` refuses are left out.
    """
    kept = sorted(rows)
    while True:
        copy = ArrowPart(path, rows[kept[0]].schema)
        try:
            for row in kept:
                copy.append(rows[row])
            sealed = copy.seal()
        except BaseException:
            copy.abandon()
            raise
        refused = {kept[at] for at in _unreadable(kind, path)}
        if not refused:
            return sealed, kept
        path.unlink()
        kept = [row for row in kept if row not in refused]
        if not kept:
            raise CorruptFile("no row of it can be read", where=path)


def _unreadable(kind: str, path: Path) -> list[int]:
    reader = ResponsesReader(path) if kind == "responses" else ShardReader(path)
    found = []
    for row in range(len(reader)):
        try:
            if isinstance(reader, ResponsesReader):
                reader[row]
            else:
                reader.states(row)
        except CorruptFile:
            found.append(row)
    return found
