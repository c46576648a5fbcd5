"""Reading Arrow files one batch at a time, sealed or still growing, and never on trust."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Protocol

import pyarrow as pa

from datagen.errors import CorruptFile
from datagen.store.arrow_message import RowMessages, blocks_of, require_sizes
from datagen.store.files import Location, map_file, open_file

MAGIC_BYTES = 8
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
PREFIX_BYTES = 8  # of a message: 0xFFFFFFFF, then the length of its metadata


class Batches(Protocol):
    """The record batches of a file, by index."""

    schema: pa.Schema

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> pa.RecordBatch:
        """Batch `index`, validated; raises CorruptFile naming file and row."""
        ...

    def columns(self, index: int, names: list[str]) -> pa.RecordBatch:
        """The same with some columns alone; the others are not read, nor decompressed."""
        ...

    def buffers(self, index: int, places: Sequence[int], *, whole: bool) -> list[memoryview] | None:
        """Buffers of a batch of one row, as in `RowMessages`. `whole`: all of them will be read.

        Raises CorruptFile.
        """
        ...

    def table(self, names: list[str]) -> pa.Table:
        """Some columns of all batches, validated; the others are not read. Raises CorruptFile."""
        ...

    def body_bytes(self, index: int) -> int:
        """What batch `index` takes in the file."""
        ...

    def end(self, index: int) -> int:
        """Where batch `index` ends in the file."""
        ...


class Rows:
    """The rows of a file whose batches hold any number of rows, by index."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        first = batches.schema.names[:1]
        self._sizes = [batches.columns(i, first).num_rows for i in range(len(batches))]
        self._ends = list(accumulate(self._sizes))
        self._last: tuple[int, pa.RecordBatch] | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def file_ends(self) -> list[int]:
        """Where the batch of each row ends in the file."""
        return [
            end
            for index, size in enumerate(self._sizes)
            for end in [self._batches.end(index)] * size
        ]

    def __getitem__(self, row: int) -> pa.RecordBatch:
        """A batch of one row, without a copy; raises CorruptFile naming the file."""
        number = bisect_right(self._ends, row)
        if self._last is None or self._last[0] != number:
            self._last = (number, self._batches[number])
        start = self._ends[number - 1] if number else 0
        return self._last[1].slice(row - start, 1)


def open_batches(where: Location, *, end: int | None = None) -> Batches:
    """A sealed file, or with `end` the batches of a `.part` up to that offset.

    Raises CorruptFile. Local files are mapped, not read.
    """
    with _damage_is_corruption(where, "no Arrow file can be read: "):
        batches = _Sealed(where) if end is None else _Growing(where, open_file(where), end)
        _require_names(batches.schema)
        return batches


def _require_names(schema: pa.Schema) -> None:
    """Raise ValueError unless the names are text: Arrow looks only when it is asked for them."""
    for field in schema:
        len(field.name)


class _Sealed:
    """A file with its footer."""

    def __init__(self, where: Location) -> None:
        self._where, self._mapping = where, map_file(where)
        self._mapped = None if self._mapping is None else memoryview(self._mapping)
        mapped = self._mapped is not None
        file = pa.BufferReader(pa.py_buffer(self._mapped)) if mapped else open_file(where)
        self._file: pa.NativeFile = file
        self._blocks = blocks_of(lambda at, n: memoryview(file.read_at(n, at)), file.size())
        self._reader = self._open()
        self.schema = self._reader.schema
        if len(self._blocks) != self._reader.num_record_batches:
            raise ValueError("its footer can be read in two ways")
        self._narrow: dict[tuple[str, ...], pa.RecordBatchFileReader] = {}
        self._messages: RowMessages | None = None
        self._next = 0

    def _open(self, names: tuple[str, ...] = ()) -> pa.RecordBatchFileReader:
        fields = [self.schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields or None)
        return pa.ipc.open_file(self._file, options=options)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> pa.RecordBatch:
        return self._batch(self._reader, index)

    def columns(self, index: int, names: list[str]) -> pa.RecordBatch:
        return self._batch(self._narrowed(names), index)

    def buffers(self, index: int, places: Sequence[int], *, whole: bool) -> list[memoryview] | None:
        offset, metadata, body = self._blocks[index].tolist()
        try:
            if whole:
                self._ask_for(index, offset, offset + metadata + body)
            message = self._bytes(offset + PREFIX_BYTES, metadata - PREFIX_BYTES)
            if self._messages is None or self._messages.places != places:
                self._messages = RowMessages(places)
            return self._messages.buffers(message, self._bytes(offset + metadata, body))
        except READ_ERRORS as e:
            raise _corrupt(self._where, f"row {index}: ", e) from e

    def _ask_for(self, index: int, begin: int, end: int) -> None:
        """Have a row read from disk at once and no more than it, unless rows are read in order: faults
        would bring it piece by piece, each with as much again as the disk reads ahead."""
        in_order, self._next = index == self._next, index + 1
        if self._mapping is not None and not in_order:
            begin -= begin % mmap.PAGESIZE
            with suppress(OSError):  # no more than a hint
                self._mapping.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def _bytes(self, at: int, size: int) -> memoryview:
        if self._mapped is not None:
            return self._mapped[at : at + size]
        return memoryview(self._file.read_at(size, at))

    def table(self, names: list[str]) -> pa.Table:
        for index in range(len(self)):
            with _damage_is_corruption(self._where, f"row {index}: "):
                self._require_sizes(index)
        with _damage_is_corruption(self._where, ""):
            table = self._narrowed(names).read_all()
            table.validate(full=True)
            return table

    def _narrowed(self, names: list[str]) -> pa.RecordBatchFileReader:
        key = tuple(names)
        if key not in self._narrow:
            self._narrow[key] = self._open(key)
        return self._narrow[key]

    def body_bytes(self, index: int) -> int:
        return int(self._blocks[index, 2])

    def end(self, index: int) -> int:
        return int(self._blocks[index].sum())

    def _batch(self, reader: pa.RecordBatchFileReader, index: int) -> pa.RecordBatch:
        with _damage_is_corruption(self._where, f"row {index}: "):
            self._require_sizes(index)
            return _checked(reader.get_batch(index))

    def _require_sizes(self, index: int) -> None:
        offset, metadata, body = self._blocks[index].tolist()
        read_at = self._file.read_at
        require_sizes(
            read_at(metadata - PREFIX_BYTES, offset + PREFIX_BYTES),
            lambda at, n: memoryview(read_at(n, offset + metadata + at)),
            body,
        )


class _Growing:
    """The messages of an unfinished file up to a journaled end."""

    def __init__(self, where: Location, file: pa.NativeFile, end: int) -> None:
        self._where = where
        if end <= MAGIC_BYTES:
            raise CorruptFile(f"the journal promises rows up to byte {end}", where=where)
        whole = file.read_buffer()
        if whole.size < end:
            raise CorruptFile(
                f"{whole.size} bytes, the journal promises {end}",
                where=where,
                fix="restore the file, or collect into a new run",
            )
        promised = pa.BufferReader(whole.slice(MAGIC_BYTES, end - MAGIC_BYTES))
        messages, ends = [], []
        for message in pa.ipc.MessageReader.open_stream(promised):
            messages.append(message)
            ends.append(MAGIC_BYTES + promised.tell())
        if not messages or promised.tell() != end - MAGIC_BYTES:
            raise ValueError(f"no row ends at byte {end}")
        self.schema = pa.ipc.read_schema(messages[0])
        self._messages, self._ends = messages[1:], ends[1:]

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, index: int) -> pa.RecordBatch:
        message = self._messages[index]
        with _damage_is_corruption(self._where, f"row {index}: "):
            body = message.body
            require_sizes(message.metadata, lambda at, n: body.slice(at, n), body.size)
            batch = pa.ipc.read_record_batch(message, self.schema)
            return _checked(batch)

    def columns(self, index: int, names: list[str]) -> pa.RecordBatch:
        return self[index].select(names)

    def buffers(
        self, index: int, places: Sequence[int], *, whole: bool  # noqa: ARG002
    ) -> list[memoryview] | None:  # fmt: skip
        message = self._messages[index]
        with _damage_is_corruption(self._where, f"row {index}: "):
            return RowMessages(places).buffers(message.metadata, memoryview(message.body))

    def table(self, names: list[str]) -> pa.Table:
        batches = [self.columns(index, names) for index in range(len(self))]
        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.Table.from_batches(batches, schema.with_metadata(self.schema.metadata))

    def body_bytes(self, index: int) -> int:
        return int(self._messages[index].body.size)

    def end(self, index: int) -> int:
        return int(self._ends[index])


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    return batch


@contextmanager
def _damage_is_corruption(where: Location, context: str) -> Iterator[None]:
    """Whatever Arrow makes of damaged bytes is one error of ours."""
    try:
        yield
    except READ_ERRORS as e:
        raise _corrupt(where, context, e) from e


def _corrupt(where: Location, context: str, e: Exception) -> CorruptFile:
    return CorruptFile(f"{context}{e}", where=str(where), fix="run `datagen verify`")
