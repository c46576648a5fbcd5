"""An Arrow IPC file while it grows: rows with known end offsets, recovery, seal.

Until it is sealed the file is named `.part` and has no footer, but from byte 8 on it is an Arrow
stream: every batch up to a journaled end offset can be read back whatever follows it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from datagen.errors import CorruptFile
from datagen.store.arrow_batches import Rows as Rows
from datagen.store.arrow_batches import open_batches as open_batches
from datagen.store.atomic import (
    begin_writeback,
    fsync_dir,
    replace_durably,
    storage_errors,
    write_all,
)
from datagen.store.digests import Digests
from datagen.store.files import open_regular
from datagen.store.layout import part

BUFFER_BYTES = 1 << 20
COMPRESSION = (
    "ipc_compression"  # schema metadata: what Arrow compresses the buffers with, if anything
)
LEVEL = 1


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A finished file: rows, bytes, sha256 of its whole content, and of each row alone.

    Row i lies in the bytes from the last end before its own (the file's begin) to `row_ends[i]`;
    `row_xxh3[i]` is their XXH3 in hex. Rows that were committed together share them. They tell which
    rows of a damaged file are still good.
    """

    path: Path
    rows: int
    n_bytes: int
    sha256: str
    row_ends: tuple[int, ...]
    row_xxh3: tuple[str, ...]


class _HashingFile(io.RawIOBase):
    """An append-only file that hashes what passes through it and gathers small writes.

    The buffer is our own because a full disk must not leave bytes behind that a later close, or the
    collector, tries to write once more.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._buffer = bytearray()
        self._synced = -1
        self.digests = Digests()
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")  # Arrow's own memory or a copy: it stays as it is
        self.digests.add(view)
        if len(view) >= BUFFER_BYTES:
            self._drain()
            write_all(self._fd, view)
            begin_writeback(self._fd, self.position, len(view))
        else:
            self._buffer += view
            if len(self._buffer) >= BUFFER_BYTES:
                self._drain()
        self.position += len(view)
        return len(view)

    def tell(self) -> int:
        return self.position

    def _drain(self) -> None:
        pending, self._buffer = self._buffer, bytearray()
        write_all(self._fd, pending)

    def sync(self) -> None:
        if self._synced != self.position:
            self._drain()
            os.fdatasync(self._fd)
            self._synced = self.position

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
            super().close()


class ArrowPart:
    """A file being written. One writer; nothing is durable before `sync`."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self._ends: list[int] = []
        with storage_errors(path):
            self._sink = _HashingFile(part(path))
            self._writer = pa.ipc.new_file(self._sink, schema, options=write_options(schema))
            fsync_dir(path.parent)

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return len(self._ends)

    @property
    def n_bytes(self) -> int:
        """Bytes written so far."""
        return self._sink.position

    def append(self, batch: pa.RecordBatch) -> int:
        """Write one batch of rows; returns its end offset."""
        with storage_errors(self.path):
            self._writer.write_batch(batch)
        self._ends += [self._sink.position] * batch.num_rows
        self._sink.digests.end_rows(batch.num_rows)
        return self._sink.position

    def sync(self) -> None:
        """Wait until everything appended is on disk."""
        with storage_errors(self.path):
            self._sink.sync()

    def seal(self) -> SealedFile:
        """Footer, sync, final name."""
        with storage_errors(self.path):
            self._writer.close()
            self._sink.sync()
            self._sink.close()
            sha256, rows = self._sink.digests.sha256(), self._sink.digests.rows()
            replace_durably(part(self.path), self.path)
        return SealedFile(self.path, self.rows, self.n_bytes, sha256, tuple(self._ends), rows)

    def abandon(self) -> None:
        """Close without sealing; what was synced can be recovered, what was not is dropped."""
        self._sink.close()


def write_options(schema: pa.Schema) -> pa.ipc.IpcWriteOptions:
    """How a file of this schema is written."""
    name = (schema.metadata or {}).get(COMPRESSION.encode())
    codec = pa.Codec(name.decode(), LEVEL) if name else None
    return pa.ipc.IpcWriteOptions(compression=codec)


def recover(path: Path, *, rows: int, end: int) -> SealedFile | None:
    """Make a sealed file of the first `rows` rows of the `.part` left by a killed writer.

    `end`: journaled end offset of the last of them. Returns None when the sealed file is already
    there (the kill came after its rename) or when no row was journaled. Raises CorruptFile.
    """
    left = part(path)
    if path.exists() or rows == 0:
        left.unlink(missing_ok=True)
        return None
    batches = open_batches(left, end=end)
    copy = ArrowPart(path.with_name(path.name + ".recovered"), batches.schema)
    try:
        for index in range(len(batches)):
            # the journal may have been cut within the sync that wrote the last batch
            copy.append(batches[index].slice(0, rows - copy.rows))
            if copy.rows == rows and index + 1 < len(batches):
                break
        if copy.rows != rows or index + 1 < len(batches):
            raise CorruptFile(
                f"{copy.rows} rows in {index + 1} of {len(batches)} batches up to byte {end}, "
                f"the journal promises {rows}",
                where=left,
            )
        sealed = copy.seal()
    except BaseException:
        copy.abandon()
        raise
    replace_durably(sealed.path, path)
    left.unlink()
    fsync_dir(path.parent)
    return replace(sealed, path=path)


def examine_sealed(path: Path) -> SealedFile:
    """Checksums of a file that an earlier process sealed. Raises CorruptFile."""
    row_ends = Rows(open_batches(path)).file_ends()
    whole, digests, start = hashlib.sha256(), [], 0
    with open_regular(path) as f:
        for end, rows in Counter(row_ends).items():
            batch = f.read(end - start)
            whole.update(batch)
            digests += [xxhash.xxh3_64(batch).hexdigest()] * rows
            start = end
        rest = f.read()
    whole.update(rest)
    return SealedFile(
        path, len(row_ends), start + len(rest), whole.hexdigest(), tuple(row_ends), tuple(digests)
    )


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with open_regular(path) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
