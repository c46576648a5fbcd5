"""journal.log: one fixed-size record per row outcome. The truth about a partition.

Header, 64 bytes: magic 8 | version u32 | zero 16 | fingerprint digest 32 | crc32 of the 60 before.
Record, 64 bytes, little-endian (RECORD): kind, opens_sync, turn, attempts, file number, end offset of
the row in its data file, tokens, time, prompt_id, crc32 of the 60 bytes before.
A record is appended only after the data it points to is on disk. Opening cuts a torn tail.

`opens_sync` is 1 on the first record of a sync. A sync begins only after the one before it is on
disk, so a bad record with a whole `opens_sync` after it was once good: damage, not a torn tail.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile, FingerprintMismatch
from datagen.store.atomic import fsync_dir, storage_errors, write_all, write_atomic
from datagen.store.files import Location, read_bytes

MAGIC, VERSION, SIZE = b"DGJRNL\x00\x01", 1, 64
RECORD = np.dtype(
    {
        "names": [
            "kind",
            "opens_sync",
            "turn",
            "attempts",
            "file",
            "end",
            "tokens",
            "time_ms",
            "prompt_id",
            "crc",
        ],
        "formats": ["u1", "u1", "<u2", "<u2", "<u2", "<u8", "<u4", "<u8", ("u1", 32), "<u4"],
        "offsets": [0, 1, 2, 4, 6, 8, 16, 20, 28, 60],
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


def _packed(entry: Entry, *, opens_sync: bool) -> bytes:
    body = struct.pack(
        "<BBHHHQIQ32s",
        entry.kind,
        opens_sync,
        entry.turn,
        min(entry.attempts, 0xFFFF),
        entry.file,
        entry.end,
        entry.tokens,
        entry.time_ms,
        bytes.fromhex(entry.prompt_id),
    )
    return body + struct.pack("<I", zlib.crc32(body))


def _valid_prefix(raw: bytes, path: str) -> NDArray[np.void]:
    """The records up to a torn tail. Raises CorruptFile when the fault is not in the last sync."""
    records = np.frombuffer(raw, dtype=RECORD, count=len(raw) // SIZE)
    view, crc32 = memoryview(raw), zlib.crc32
    crcs = np.fromiter(
        (crc32(view[at : at + 60]) for at in range(0, len(records) * SIZE, SIZE)),
        dtype=np.uint32,
        count=len(records),
    )
    whole = (crcs == records["crc"]) & (records["kind"] >= 1) & (records["kind"] <= max(Kind))
    if whole.all():
        return records
    first = int(np.argmin(whole))
    if (whole[first:] & (records["opens_sync"][first:] == 1)).any():
        raise CorruptFile(
            f"record {first} is damaged, and later ones are whole",
            where=path,
            fix="restore the file, or remove this partition's directory to collect it again",
        )
    return records[:first]


def read_journal(path: Path, digest: str | None = None) -> NDArray[np.void]:
    """The valid records, as a structured array of dtype RECORD; the file is not touched.

    An absent file has none. Raises CorruptFile, and FingerprintMismatch when `digest` is given.
    """
    try:
        raw = read_bytes(path)
    except FileNotFoundError:
        return np.zeros(0, dtype=RECORD)
    except OSError as e:
        raise CorruptFile(f"no journal can be read: {e}", where=path, fix="restore the file") from e
    return parse_journal(raw, path, digest)


def parse_journal(raw: bytes, where: Location, digest: str | None = None) -> NDArray[np.void]:
    """The valid records of a journal's content; `where` names it in errors, as of `read_journal`."""
    path = str(where)
    if len(raw) < SIZE or raw == bytes(SIZE):
        return np.zeros(0, dtype=RECORD)  # killed while the header was written: no row was promised
    body, (crc,) = raw[:60], struct.unpack_from("<I", raw, 60)
    if not raw.startswith(MAGIC) or zlib.crc32(body) != crc:
        raise CorruptFile(
            "the header is damaged",
            where=path,
            fix="restore the file, or remove this partition's directory to collect it again",
        )
    (version,) = struct.unpack_from("<I", raw, len(MAGIC))
    if version != VERSION:
        raise CorruptFile(
            f"version {version}, this reads {VERSION}",
            where=path,
            fix="go on with the datagen that began the run",
        )
    found = raw[28:60].hex()
    if digest is not None and found != digest:
        raise FingerprintMismatch(
            f"the journal belongs to fingerprint {found[:12]}, the run has {digest[:12]}",
            where=path,
        )
    return _valid_prefix(raw[SIZE:], path)


def write_journal(path: Path, digest: str, entries: Iterable[Entry]) -> None:
    """Put a whole journal in the place of another, atomically: one sync of `entries`."""
    records = [_packed(entry, opens_sync=n == 0) for n, entry in enumerate(entries)]
    write_atomic(path, _header(digest) + b"".join(records))


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
            try:
                if not len(records):
                    os.ftruncate(fd, 0)
                    write_all(fd, _header(digest))
                os.ftruncate(fd, SIZE + len(records) * SIZE)
                os.lseek(fd, 0, os.SEEK_END)
                os.fsync(fd)
                fsync_dir(path.parent)
            except OSError:
                os.close(fd)
                raise
        return cls(path, fd), records

    def append(self, entry: Entry) -> None:
        """Queue one record for the next sync."""
        self._buffer.append(_packed(entry, opens_sync=not self._buffer))

    def sync(self) -> None:
        """Write the queued records and wait until they are on disk."""
        if not self._buffer:
            return
        with storage_errors(self._path):
            write_all(self._fd, b"".join(self._buffer))
            os.fdatasync(self._fd)
        self._buffer.clear()

    def close(self) -> None:
        """Close without syncing: what was not synced was not promised."""
        os.close(self._fd)
