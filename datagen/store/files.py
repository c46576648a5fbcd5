"""Where files are read from: a local path is mapped, anything else goes through fsspec."""

from __future__ import annotations

import errno
import io
import mmap
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from datagen.errors import CorruptFile, LimitReached

MOST_BYTES = 4 << 30  # of what is read whole: a journal of that size has 67 million records

LEADS_OUT = "a link leads out of the run"

Location = Path | str
"""A local path, or a URL that fsspec knows (`s3://bucket/run`)."""


def local_path(where: Location) -> Path | None:
    """The path of a location on this machine; None when it is elsewhere."""
    if isinstance(where, Path):
        return where
    if "://" not in where:
        return Path(where)
    return Path(where.removeprefix("file://")) if where.startswith("file://") else None


def beside(where: Location, relative: str) -> Location:
    """`relative` to the directory that holds the file `where`; the caller has checked its spelling.

    Raises CorruptFile where a link leads out of that directory: runs come from elsewhere.
    """
    path = local_path(where)
    if path is not None:
        found = path.parent / relative
        if not _inside(found, path.parent):
            raise CorruptFile(LEADS_OUT, where=found, fix="put the file itself there")
        return found
    return f"{str(where).rpartition('/')[0]}/{relative}"


def leading_out(folder: Path, run: Path) -> list[Path]:
    """What of `folder`, itself or a file in it, a link leads out of the run. Raises OSError."""
    if not _inside(folder, run):
        return [folder]
    return [path for path in sorted(folder.iterdir()) if not _inside(path, run)]


def _inside(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def read_bytes(where: Location) -> bytes:
    """The whole content. Raises FileNotFoundError, OSError."""
    path = local_path(where)
    if path is not None:
        with open_regular(path) as f:
            size = os.fstat(f.fileno()).st_size
            if size > MOST_BYTES:
                raise OSError(
                    errno.EFBIG, f"{size} bytes, at most {MOST_BYTES} are read", str(path)
                )
            return f.read()
    fs, name = _remote(where)
    content: bytes = fs.cat_file(name)
    return content


def open_regular(path: Path) -> io.BufferedReader:
    """A file to read, which is one: a pipe would be waited for, a device may never end.

    Raises OSError, LimitReached.
    """
    with within_limits(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def open_file(where: Location) -> pa.NativeFile:
    """A file to read at any place: mapped, without a copy, where it is local.

    Raises OSError, LimitReached.
    """
    path = local_path(where)
    if path is not None:
        open_regular(path).close()
        with within_limits(path):
            return pa.memory_map(str(path))
    fs, name = _remote(where)
    return pa.PythonFile(fs.open(name, "rb"), mode="r")


def map_file(where: Location) -> mmap.mmap | None:
    """All of a local file, mapped; None where it is elsewhere.

    Raises OSError, LimitReached, ValueError when empty.
    Arrow's own mapping asks the system for whatever is taken out of it, which for a view of the whole
    is the whole file.
    """
    path = local_path(where)
    if path is None:
        return None
    with open_regular(path) as f, within_limits(path):
        return mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)


@contextmanager
def within_limits(path: Path) -> Iterator[None]:
    """LimitReached where an OSError says so: what the system has no more of tells nothing of a file."""
    try:
        yield
    except OSError as e:
        fixes = {
            errno.EMFILE: f"at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files may be open "
            "in a process: raise `ulimit -n`",
            errno.ENFILE: "the whole system has too many files open: raise fs.file-max",
            errno.ENOMEM: "no memory for a mapping: raise `ulimit -v` or vm.max_map_count",
        }
        if e.errno not in fixes:
            raise
        raise LimitReached("it cannot be opened", where=path, fix=fixes[e.errno]) from e


def _remote(where: Location) -> tuple[Any, str]:
    """The file system of a URL, and the name in it."""
    import fsspec  # few runs read from elsewhere, and it is 2 MB

    fs, name = fsspec.core.url_to_fs(str(where))
    return fs, str(name)
