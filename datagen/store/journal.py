"""journal.log: one fixed-size record per row outcome. The truth about a partition.

Header, 64 bytes: magic 8 | version u32 | zero 16 | fingerprint digest 32 | crc32 of the 60 before.
Record, 64 bytes, little-endian (RECORD): kind, turn, attempts, file number, end offset of the row in
its data file, tokens, time, prompt_id, crc32 of the 60 bytes before.
A record is appended only after the data it points to is on disk. Opening cuts a torn tail.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile, FingerprintMismatch
from datagen.store.atomic import fsync_dir, storage_errors

MAGIC, VERSION, SIZE = b"DGJRNL\x00\x01", 1, 64
RECORD = np.dtype(
    {
        "names": [
            "kind",
            "turn",
            "attempts",
            "file",
            "end",
            "tokens",
            "time_ms",
            "prompt_id",
            "crc",
        ],
        "formats": ["u1", "<u2", "<u2", "<u2", "<u8", "<u4", "<u8", ("u1", 32), "<u4"],
        "offsets": [0, 2, 4, 6, 8, 16, 20, 28, 60],
        "itemsize": SIZE,
    }
)


class Kind(IntEnum):
    """What happened to a row."""

    RESPONSE = 1
    STATES = 2
    REJECTED = 3
    RETRY = 4
    """A tombstone: the row's rejection is taken back, it is pending again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record. `end`: offset just past the row in its data file; `time_ms`: Unix, by the caller."""

    kind: Kind
    prompt_id: str
    turn: int
    file: int
    end: int
    tokens: int
    attempts: int
    time_ms: int


def _header(digest: str) -> bytes:
    body = MAGIC + struct.pack("<I", VERSION) + bytes(16) + bytes.fromhex(digest)
    return body + struct.pack("<I", zlib.crc32(body))


def _packed(entry: Entry) -> bytes:
    body = struct.pack(
        "<BxHHHQIQ32s",
        entry.kind,
        entry.turn,
        min(entry.attempts, 0xFFFF),
        entry.file,
        entry.end,
        entry.tokens,
        entry.time_ms,
        bytes.fromhex(entry.prompt_id),
    )
    return body + struct.pack("<I", zlib.crc32(body))


def _valid_prefix(raw: bytes) -> NDArray[np.void]:
    """The records up to the first that is torn or fails its checksum."""
    records = np.frombuffer(raw, dtype=RECORD, count=len(raw) // SIZE)
    view, crc32 = memoryview(raw), zlib.crc32
    crcs = np.fromiter(
        (crc32(view[at : at + 60]) for at in range(0, len(records) * SIZE, SIZE)),
        dtype=np.uint32,
        count=len(records),
    )
    bad = np.flatnonzero((crcs != records["crc"]) | (records["kind"] < 1) | (records["kind"] > 4))
    return records[: bad[0]] if len(bad) else records


def read_journal(path: Path, digest: str | None = None) -> NDArray[np.void]:
    """The valid records, as a structured array of dtype RECORD; the file is not touched.

    An absent file has none. Raises CorruptFile, and FingerprintMismatch when `digest` is given.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return np.zeros(0, dtype=RECORD)
    if len(raw) < SIZE:
        return np.zeros(0, dtype=RECORD)  # killed while the header was written: no row was promised
    body, (crc,) = raw[:60], struct.unpack_from("<I", raw, 60)
    if not raw.startswith(MAGIC) or zlib.crc32(body) != crc:
        raise CorruptFile("the header is damaged", where=path, fix="run `datagen verify`")
    found = raw[28:60].hex()
    if digest is not None and found != digest:
        raise FingerprintMismatch(
            f"the journal belongs to fingerprint {found[:12]}, the run has {digest[:12]}",
            where=path,
        )
    return _valid_prefix(raw[SIZE:])


class Journal:
    """The append side. `append` buffers; `sync` writes and makes durable."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        self._buffer: list[bytes] = []

    @classmethod
    def open(cls, path: Path, digest: str) -> tuple[Journal, NDArray[np.void]]:
        """Open or create; cuts the torn tail; returns the journal and its valid records."""
        records = read_journal(path, digest)
        with storage_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if os.fstat(fd).st_size < SIZE:
                os.ftruncate(fd, 0)
                os.pwrite(fd, _header(digest), 0)
            os.ftruncate(fd, SIZE + len(records) * SIZE)
            os.lseek(fd, 0, os.SEEK_END)
            os.fsync(fd)
            fsync_dir(path.parent)
        return cls(path, fd), records

    def append(self, entry: Entry) -> None:
        """Queue one record for the next sync."""
        self._buffer.append(_packed(entry))

    def sync(self) -> None:
        """Write the queued records and wait until they are on disk."""
        if not self._buffer:
            return
        with storage_errors(self._path):
            data = memoryview(b"".join(self._buffer))
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
        self._buffer.clear()

    def close(self) -> None:
        """Close without syncing: what was not synced was not promised."""
        os.close(self._fd)
