"""rejected.jsonl: why samples were rejected, one JSON object a line.

{"sample_id", "stage", "reason", "detail", "attempts"}; `reason` is a short stable name, `detail` the
server's or our own words. Bytes past the last journaled offset are cut on open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from datagen.errors import CorruptFile
from datagen.store.atomic import storage_errors

MAX_DETAIL = 2000


@dataclass(frozen=True, slots=True)
class Rejection:
    """One rejected sample."""

    sample_id: str
    stage: str
    reason: str
    detail: str
    attempts: int


class RejectionLog:
    """Append side of the file; created with the first rejection."""

    def __init__(self, path: Path, end: int) -> None:
        self._path, self._end = path, end
        self._fd: int | None = None
        self._buffer: list[bytes] = []

    @classmethod
    def open(cls, path: Path, *, end: int) -> RejectionLog:
        """Open with `end` journaled bytes; cuts what lies beyond. Raises CorruptFile."""
        size = path.stat().st_size if path.exists() else 0
        if size < end:
            raise CorruptFile(f"{size} bytes, the journal promises {end}", where=path)
        if size > end:
            os.truncate(path, end)
        return cls(path, end)

    def append(self, rejection: Rejection) -> int:
        """Queue one line for the next sync; returns its end offset."""
        record = asdict(rejection)
        record["detail"] = rejection.detail[:MAX_DETAIL].encode("utf-8", "replace").decode()
        self._buffer.append(orjson.dumps(record) + b"\n")
        self._end += len(self._buffer[-1])
        return self._end

    def sync(self) -> None:
        """Write the queued lines and wait until they are on disk."""
        if not self._buffer:
            return
        with storage_errors(self._path):
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            data = memoryview(b"".join(self._buffer))
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
        self._buffer.clear()

    def read(self) -> Iterator[Rejection]:
        """The lines on disk, in order."""
        return read_rejections(self._path)

    def close(self) -> None:
        """Close; what was not synced is dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_rejections(path: Path) -> Iterator[Rejection]:
    """Every rejection of a file; an absent file has none. Raises CorruptFile naming the line."""
    if not path.exists():
        return
    with open(path, "rb") as f:
        for number, line in enumerate(f, start=1):
            try:
                yield Rejection(**orjson.loads(line))
            except (orjson.JSONDecodeError, TypeError) as e:
                raise CorruptFile(f"line {number}: {e}", where=path) from e
