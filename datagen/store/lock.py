"""One writer per run directory: an flock that names its holder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from datagen.errors import RunLocked


class RunLock:
    """Context manager. The kernel drops the lock with the process, however it dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> RunLock:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            holder = os.read(fd, 256).decode(errors="replace").strip() or "an unnamed process"
            os.close(fd)
            raise RunLocked(
                f"another process is writing this run: {holder}",
                where=self._path.parent,
                fix="wait for it, stop it, or choose another run name",
            ) from e
        except OSError as e:
            os.close(fd)
            raise RunLocked(
                f"the file system grants no lock: {os.strerror(e.errno or 0)}",
                where=self._path.parent,
                fix="put the run on a file system that supports flock",
            ) from e
        os.ftruncate(fd, 0)
        os.write(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        self._fd = fd
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None
