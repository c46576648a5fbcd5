"""Writes that are whole or absent: temporary name in the same directory, fsync, rename, fsync it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from datagen.errors import StorageFull

FULL = (errno.ENOSPC, errno.EDQUOT)
SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h: begin, and wait for nothing


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn 'no space' and 'over quota' into StorageFull naming `path`; other errors pass."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise StorageFull(
                f"no space left to write: {os.strerror(e.errno)}",
                where=path,
                fix="free space and run the same command again: what is committed stays",
            ) from e
        raise


def fsync_dir(directory: Path) -> None:
    """Make renames and new names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path) -> None:
    """Create a directory and its parents; their names survive a power cut."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    with storage_errors(directory):
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write the whole of `data`, however many calls the kernel takes for it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux alone has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def begin_writeback(fd: int, first: int, n_bytes: int) -> None:
    """Let the disk begin with bytes that were written, so that a later sync finds them done.

    A hint: it makes nothing durable, and what goes wrong is the sync's to report.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, first, n_bytes, SYNC_FILE_RANGE_WRITE)


def replace_durably(temporary: Path, path: Path) -> None:
    """Give a finished, already synced file its final name."""
    with storage_errors(path):
        os.replace(temporary, path)
        fsync_dir(path.parent)


def unlink_durably(path: Path) -> None:
    """Remove a file for good; an absent one is fine."""
    if path.exists():
        path.unlink()
        fsync_dir(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file, durably; a reader sees the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with storage_errors(path):
        try:
            with open(temporary, "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        replace_durably(temporary, path)


def write_json_atomic(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON; NaN and infinity become null."""
    write_atomic(path, orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
