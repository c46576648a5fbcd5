"""What an Arrow file says of its own sizes, read before Arrow acts on it.

Arrow allocates what a compressed buffer states as its size, so the statement is held against the file
first. Only the few tables needed are followed, every offset checked:
    Footer   { recordBatches: [Block { offset i64, metadata i32 + 4, body i64 }] (3) }
    Message  { header: RecordBatch (2) }
    RecordBatch { buffers: [Buffer { offset i64, length i64 }] (2), compression (3) }
See https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format and its .fbs files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAGIC = b"ARROW1"
BLOCK = np.dtype(
    {"names": ["offset", "metadata", "body"], "formats": ["<i8", "<i4", "<i8"],
     "offsets": [0, 8, 16], "itemsize": 24}
)  # fmt: skip
BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])
ALWAYS_BYTES = 256 << 20
MOST_RATIO = (
    256  # of what a buffer states to what it takes; bf16 states reach 4 when they are broken
)
ReadAt = Callable[[int, int], memoryview | bytes]
"""(offset, length) -> so many bytes, or fewer at the end."""


class Damaged(ValueError):
    """The bytes are not what the format says."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A flatbuffers table at `at` of `data`."""

    data: bytes
    at: int

    def child(self, number: int) -> _Table | None:
        """The table that field `number` points to."""
        at = self._field(number)
        return None if at is None else _Table(self.data, at + self._read("<I", at))

    def vector(self, number: int, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        """The structs of field `number`."""
        at = self._field(number)
        if at is None:
            return np.zeros(0, dtype=dtype)
        at += self._read("<I", at)
        count = self._read("<I", at)
        if at + 4 + count * dtype.itemsize > len(self.data):
            raise Damaged(f"a vector of {count} ends after its file")
        return np.frombuffer(self.data, dtype=dtype, count=count, offset=at + 4)

    def _field(self, number: int) -> int | None:
        table = self.at - self._read("<i", self.at)
        at = 4 + 2 * number
        offset = self._read("<H", table + at) if at < self._read("<H", table) else 0
        return self.at + offset if offset else None

    def _read(self, kind: str, at: int) -> int:
        if not 0 <= at <= len(self.data) - struct.calcsize(kind):
            raise Damaged("an offset points out of its table")
        (value,) = struct.unpack_from(kind, self.data, at)
        return int(value)


def _root(data: bytes) -> _Table:
    if len(data) < 4:
        raise Damaged("no table")
    return _Table(data, int.from_bytes(data[:4], "little"))


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
    blocks = _root(bytes(read_at(size - 10 - length, length))).vector(3, BLOCK)
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
    header = _root(bytes(metadata)).child(2)
    if header is None:
        raise Damaged("a message without a batch")
    compressed = header.child(3) is not None
    stated = 0
    for offset, length in header.vector(2, BUFFER).tolist():
        if offset < 0 or length < 0 or offset > body_size - length:
            raise Damaged("a buffer lies outside of its batch")
        if compressed and length:
            prefix = int.from_bytes(bytes(body_at(offset, min(8, length))), "little", signed=True)
            if prefix < -1 or length < 8:
                raise Damaged(f"a buffer states {prefix} bytes")
            stated += prefix if prefix >= 0 else length - 8
    if stated > max(ALWAYS_BYTES, MOST_RATIO * body_size):
        raise Damaged(f"buffers of {body_size} bytes state {stated}")
