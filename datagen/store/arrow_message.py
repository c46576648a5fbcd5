"""What an Arrow file says of its own sizes, read before Arrow acts on it.

Arrow allocates what a compressed buffer states as its size, so the statement is held against the file
first. Only the few tables needed are followed, every offset checked:
    Footer   { recordBatches: [Block { offset i64, metadata i32 + 4, body i64 }] (3) }
    Message  { header: RecordBatch (2) }
    RecordBatch { length i64 (0), nodes: [FieldNode { length i64, null_count i64 }] (1),
                  buffers: [Buffer { offset i64, length i64 }] (2), compression (3) }
See https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format and its .fbs files.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

MAGIC = b"ARROW1"
BLOCK = np.dtype(
    {"names": ["offset", "metadata", "body"], "formats": ["<i8", "<i4", "<i8"],
     "offsets": [0, 8, 16], "itemsize": 24}
)  # fmt: skip
ALWAYS_BYTES = 256 << 20
MOST_RATIO = (
    256  # of what a buffer states to what it takes; bf16 states reach 4 when they are broken
)
ReadAt = Callable[[int, int], memoryview | bytes]
"""(offset, length) -> so many bytes, or fewer at the end."""


class Damaged(ValueError):
    """The bytes are not what the format says."""


# Plain functions over bytes: a training epoch passes here once a sample.
_PAIR = struct.Struct("<qq")
_U16, _I32, _U32, _I64 = (struct.Struct(f"<{kind}").unpack_from for kind in "HiIq")


def _root(data: bytes) -> int:
    """Where the outermost table of a flatbuffer lies."""
    return int(_U32(data, 0)[0])


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where the value of a table's field lies; None when the table has it not."""
    layout = table - _I32(data, table)[0]
    if layout < 0:
        raise Damaged("an offset points out of its table")
    at = 4 + 2 * number
    if at >= _U16(data, layout)[0]:
        return None
    offset = _U16(data, layout + at)[0]
    return table + offset if offset else None


def _child(data: bytes, table: int, number: int) -> int | None:
    """Where the table lies that a field points to."""
    at = _field(data, table, number)
    return None if at is None else at + _U32(data, at)[0]


def _vector(data: bytes, table: int, number: int, itemsize: int) -> tuple[int, int]:
    """Where the items of a field's vector begin, and how many there are."""
    at = _child(data, table, number)
    if at is None:
        return 0, 0
    count = int(_U32(data, at)[0])
    if at + 4 + count * itemsize > len(data):
        raise Damaged(f"a vector of {count} ends after its file")
    return at + 4, count


def _structs(data: bytes, table: int, number: int, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """A field's vector of structs."""
    at, count = _vector(data, table, number, dtype.itemsize)
    return np.frombuffer(data, dtype=dtype, count=count, offset=at)


def _pairs(data: bytes, table: int, number: int) -> Iterator[tuple[int, int]]:
    """A field's vector of pairs of i64: for a few, quicker than an array."""
    at, count = _vector(data, table, number, _PAIR.size)
    return _PAIR.iter_unpack(data[at : at + count * _PAIR.size])


def blocks_of(read_at: ReadAt, size: int) -> NDArray[np.int64]:
    """int64 [batches, 3]: offset, bytes of metadata, bytes of body, from the footer. Raises Damaged.

    `size`: of the file.
    """
    tail = bytes(read_at(max(0, size - 10), 10))
    if len(tail) != 10 or tail[4:] != MAGIC:
        raise Damaged("the file does not end as an Arrow file does")
    length = int.from_bytes(tail[:4], "little", signed=True)
    if not 0 < length <= size - 10:
        raise Damaged(f"a footer of {length} bytes in a file of {size}")
    footer = bytes(read_at(size - 10 - length, length))
    try:
        blocks = _structs(footer, _root(footer), 3, BLOCK)
    except struct.error as e:
        raise Damaged(f"no footer: {e}") from e
    offsets, metadata, body = (
        blocks[name].astype(np.int64) for name in ("offset", "metadata", "body")
    )
    if (
        (offsets < 0).any()
        or (metadata < 8).any()
        or (body < 0).any()
        or (offsets > size - metadata).any()
        or (body > size - offsets - metadata).any()
    ):
        raise Damaged("a batch lies outside of the file")
    return np.stack([offsets, metadata, body], axis=1)


def require_sizes(metadata: memoryview | bytes, body_at: ReadAt, body_size: int) -> None:
    """Raise Damaged unless the buffers of a record batch have sizes that can be true.

    `metadata`: the message's flatbuffer; `body_at` reads the body.
    """
    data = bytes(metadata)
    _, compressed, buffers = _batch(data, body_size)
    stated = 0
    for offset, length in buffers if compressed else ():
        if length:
            prefix = int.from_bytes(bytes(body_at(offset, min(8, length))), "little", signed=True)
            if prefix < -1 or length < 8:
                raise Damaged(f"a buffer states {prefix} bytes")
            stated += prefix if prefix >= 0 else length - 8
    if stated > max(ALWAYS_BYTES, MOST_RATIO * body_size):
        raise Damaged(f"buffers of {body_size} bytes state {stated}")


class RowMessages:
    """The messages of a file whose batches hold one row without a null each.

    They are the same bytes but for a few numbers. Where those lie is found in the first; each of the
    others takes a comparison and an unpacking, where following the tables took a tenth of a read.
    """

    def __init__(self, places: Sequence[int]) -> None:
        """`places`: of the buffers wanted in the schema's order, ascending."""
        self.places = places
        self._pattern: _Pattern | None = None

    def buffers(self, metadata: memoryview | bytes, body: memoryview) -> list[memoryview] | None:
        """The buffers wanted, not copied. None where Arrow compressed them.

        `metadata`: the message's flatbuffer. Raises Damaged.
        """
        data, size, pattern = bytes(metadata), len(body), self._pattern
        if pattern is None or not pattern.matches(data):
            header, compressed, _ = _batch(data, size)
            if compressed:
                return None
            pattern = self._pattern = _Pattern(data, header, self.places)
        found = []
        for offset, length in pattern.pairs(data):
            if offset < 0 or length < 0 or offset + length > size:
                raise Damaged("a buffer lies outside of its batch")
            found.append(body[offset : offset + length])
        return found


class _Pattern:
    """What messages have in common, and where their numbers lie. Raises Damaged."""

    def __init__(self, data: bytes, header: int, places: Sequence[int]) -> None:
        try:
            at = _field(data, header, 0)
            rows = _I64(data, at)[0] if at is not None else 0
            size = _field(data, _root(data), 3)
            nodes, n_nodes = _vector(data, header, 1, _PAIR.size)
            buffers, n_buffers = _vector(data, header, 2, _PAIR.size)
            missing = any(nulls for _, nulls in _pairs(data, header, 1))
        except struct.error as e:
            raise Damaged(f"no message: {e}") from e
        if rows != 1 or missing:
            raise Damaged(f"a batch of {rows} rows" if rows != 1 else "a cell is missing")
        if places[-1] >= n_buffers:
            raise Damaged(f"a batch of {n_buffers} buffers")
        own = bytearray(b"\xff" * len(data))
        own[buffers : buffers + _PAIR.size * n_buffers] = bytes(_PAIR.size * n_buffers)
        for start in range(nodes, nodes + _PAIR.size * n_nodes, _PAIR.size):
            own[start : start + 8] = bytes(8)  # a node's length, not its count of nulls
        if size is not None:
            own[size : size + 8] = bytes(8)
        self._length, self._mask = len(data), int.from_bytes(own, "little")
        self._same = int.from_bytes(data, "little") & self._mask
        kinds = "".join(
            f"{_PAIR.size * (at - before - 1)}x2q"
            for before, at in itertools.pairwise([-1, *places])
        )
        self._numbers = struct.Struct(f"<{buffers}x{kinds}").unpack_from

    def matches(self, data: bytes) -> bool:
        """Whether nothing but the numbers differs."""
        return (
            len(data) == self._length and int.from_bytes(data, "little") & self._mask == self._same
        )

    def pairs(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Offset and length of the buffers wanted."""
        numbers = iter(self._numbers(data))
        return zip(numbers, numbers, strict=True)


def _batch(data: bytes, body_size: int) -> tuple[int, bool, list[tuple[int, int]]]:
    """Where a message's batch lies, whether it is compressed, its buffers within the body."""
    try:
        header = _child(data, _root(data), 2)
        if header is None:
            raise Damaged("a message without a batch")
        compressed = _field(data, header, 3) is not None
        buffers = [*_pairs(data, header, 2)]
    except struct.error as e:
        raise Damaged(f"no message: {e}") from e
    for offset, length in buffers:
        if offset < 0 or length < 0 or offset > body_size - length:
            raise Damaged("a buffer lies outside of its batch")
    return header, compressed, buffers
