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
from datagen.store.atomic import fsync_dir, storage_errors, write_all
from datagen.store.files import open_regular

MAX_DETAIL = 2000


@dataclass(frozen=True, slots=True)
class Rejection:
    """One rejected sample."""

    sample_id: str
    stage: str
    reason: str
    detail: str
    attempts: int


TYPES = {"sample_id": str, "stage": str, "reason": str, "detail": str, "attempts": int}


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
        self._buffer.append(rejection_line(rejection))
        self._end += len(self._buffer[-1])
        return self._end

    def sync(self) -> None:
        """Write the queued lines and wait until they are on disk."""
        if not self._buffer:
            return
        with storage_errors(self._path):
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                fsync_dir(self._path.parent)
            write_all(self._fd, b"".join(self._buffer))
            os.fdatasync(self._fd)
        self._buffer.clear()

    def close(self) -> None:
        """Close; what was not synced is dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def rejection_line(rejection: Rejection) -> bytes:
    """A rejection as it stands in the file."""
    record = asdict(rejection)
    record["detail"] = rejection.detail[:MAX_DETAIL].encode("utf-8", "replace").decode()
    return orjson.dumps(record) + b"\n"


def read_rejections(path: Path, count: int) -> Iterator[Rejection]:
    """The first `count` rejections of a file, as many as the journal promises; the rest is a tail.

    Raises CorruptFile naming the line, or that there are fewer.
    """
    if count == 0:
        return
    try:
        with open_regular(path) as f:
            for number in range(1, count + 1):
                yield parse_rejection(path, number, f.readline())
    except FileNotFoundError as e:
        raise CorruptFile(
            f"the file is gone, the journal promises {count} lines", where=path
        ) from e
    except OSError as e:
        raise CorruptFile(f"no rejections can be read: {e}", where=path) from e


def parse_rejection(path: Path, number: int, line: bytes) -> Rejection:
    """One line; raises CorruptFile naming it."""
    try:
        if not line.endswith(b"\n"):
            raise ValueError("the line does not end")
        entry = Rejection(**orjson.loads(line))
        for name, kind in TYPES.items():
            if type(getattr(entry, name)) is not kind:
                raise ValueError(f"{name} is no {kind.__name__}")
    except (ValueError, TypeError) as e:
        raise CorruptFile(f"line {number}: {e}", where=path) from e
    return entry
