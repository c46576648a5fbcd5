"""Publishes captures from inside an engine: threads off the compute path, and a bound on pending bytes.

Standard library alone: the SGLang plugin and the embedded target both run it. A capture is counted
from the moment its first rows are held in memory until its file is published or has failed.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datagen.capture import spares
from datagen.capture.carried import Job, write_job
from datagen.capture.carrier import Carrier
from datagen.capture.spool import (
    ITEM_BYTES,
    PROTOCOL,
    STALE_S,
    SpoolError,
    spool_name,
    sweep,
)

log = logging.getLogger(__name__)
MIB = 1 << 20
CARRIED_BYTES = 4 * MIB  # above, files are few enough for threads, and too much to copy once more
ROOM_KNOWN_S = 0.05  # how long what a file system said of its room is believed


class SpoolBusy(SpoolError):
    """Too many bytes wait for the spool, or its file system has no room: ask again later."""


@dataclass(frozen=True)
class RowFormat:
    """What every row of a server holds. `dtype`: its name in safetensors."""

    boundaries: tuple[int, ...]
    hidden: int
    final_norm: str
    dtype: str
    server: str

    @functools.cached_property
    def width(self) -> int:
        """Values per row: the boundaries in order, then the final state."""
        return (len(self.boundaries) + 1) * self.hidden

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.width * ITEM_BYTES[self.dtype]

    def metadata(self, rid: str) -> dict[str, str]:
        """The spool file's `__metadata__`."""
        return {
            "rid": rid,
            "boundaries": ",".join(map(str, self.boundaries)),
            "hidden": str(self.hidden),
            "final_norm": self.final_norm,
            "server": self.server,
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a writer. Bytes, threads, seconds; `stale_s`: age at which unread files go."""

    pending_bytes: int = 4096 * MIB
    min_free_bytes: int = 256 * MIB
    threads: int = 8  # one writes and sums 1.2 GB/s to memory; an engine makes 5 at Kimi's width
    wait_s: float = 30.0
    stale_s: float = STALE_S
    carried_bytes: int = 0
    """Captures of up to so many bytes are written by processes of their own (see carrier.py)."""


def private_directory(directory: Path) -> Path:
    """Create the spool directory for this user alone. Raises SpoolError when others can write to it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:  # a name others can guess
        raise SpoolError(f"others can write to the spool directory {directory}: chmod 700 your own")
    return directory


class SpoolWriter:
    """Publishes captures under a directory of the server's choosing, never a client's."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        """Sweeps what earlier servers left. Raises SpoolError for a directory open to others."""
        self.directory, self.limits = private_directory(directory), limits
        self._pending, self._changed = 0, threading.Condition()
        self._room, self._room_known_until = 0, 0.0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._carrier = Carrier(self.release) if limits.carried_bytes else None
        self._closing = threading.Event()
        self._sweep()
        self._threads = [
            threading.Thread(target=self._work, name=f"spool-{i}", daemon=True)
            for i in range(limits.threads)
        ]
        self._sweeper = threading.Thread(target=self._sweep_for_ever, name="spool-gc", daemon=True)
        for thread in (*self._threads, self._sweeper):
            thread.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes of rows held and not yet published."""
        with self._changed:
            return self._pending

    def hold(self, n_bytes: int, *, own: int = 0) -> None:
        """Count rows that are now kept in memory; blocks while too much is pending, then refuses.

        `own`: bytes the same capture already holds; they never block it, else a capture larger than
        the bound could not end. Raises SpoolBusy.
        """

        def fits() -> bool:
            return self._pending <= own or self._pending + n_bytes <= self.limits.pending_bytes

        with self._changed:
            if not self._changed.wait_for(fits, self.limits.wait_s):
                raise SpoolBusy(
                    f"{self._pending} bytes of captures still wait to be written after "
                    f"{self.limits.wait_s:g} s: the spool is too slow for this load"
                )
            self._pending += n_bytes

    def release(self, n_bytes: int) -> None:
        """Give back what `hold` counted."""
        with self._changed:
            self._pending -= n_bytes
            self._changed.notify_all()

    def publish(
        self,
        rid: str,
        pieces: Sequence[memoryview],
        n_tokens: int,
        input_ids: bytes,
        row_format: RowFormat,
    ) -> dict[str, Any]:
        """Queue a capture whose rows are already held; returns what the answer says of it.

        `pieces`: consecutive row-major parts, not copied. `input_ids`: little-endian int32. What was
        held is released when the file is published or has failed. Raises SpoolBusy (nothing queued,
        still held) when the file system has no room, SpoolError for a capture without tokens.
        """
        if n_tokens < 1:
            raise SpoolError(f"{rid}: a capture of {n_tokens} tokens")
        n_bytes = n_tokens * row_format.row_bytes
        self._require_room(n_bytes)
        path = f"{self.directory}/{spool_name(rid)}"
        job = Job(
            path, list(pieces), n_tokens, row_format.width, row_format.dtype, input_ids,
            row_format.metadata(rid), n_bytes,
        )  # fmt: skip
        if self._carrier is not None and n_bytes <= self.limits.carried_bytes:
            self._carrier.put(job)
        else:
            self._jobs.put(job)
        return {
            "path": path,
            "bytes": n_bytes + 4 * n_tokens + 4,
            "rows": n_tokens,
            "width": row_format.width,
            "hidden": row_format.hidden,
            "boundaries": list(row_format.boundaries),
            "final_norm": row_format.final_norm,
            "dtype": row_format.dtype,
            "server": row_format.server,
            "protocol": PROTOCOL,
            "spares": True,
        }

    def _require_room(self, n_bytes: int) -> None:
        """Raise SpoolBusy unless what is pending fits. Asks the file system now and then only."""
        now = time.monotonic()
        if now >= self._room_known_until or self._room < n_bytes:
            waiting = self.pending_bytes  # with this one
            free = self._free()
            if free - waiting < self.limits.min_free_bytes:
                spares.drop(self.directory)
                free = self._free()
            self._room = free - waiting - self.limits.min_free_bytes
            self._room_known_until = now + ROOM_KNOWN_S
            if self._room < 0:
                raise SpoolBusy(
                    f"{free} bytes free in the spool {self.directory}, {waiting} to write"
                )
        else:
            self._room -= n_bytes

    def _free(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Finish what is queued, then end the threads."""
        self._closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        if self._carrier is not None:
            self._carrier.close()
        spares.drop(self.directory)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            write_job(job)
            n_bytes = job.n_bytes
            del job  # its pieces keep a whole batch of the engine in memory
            self.release(n_bytes)

    def _sweep(self) -> None:
        swept = sweep(self.directory, older_than_s=self.limits.stale_s, now=time.time())
        if swept.n_files:
            log.warning(
                "removed %d stale spool files (%d bytes) from %s",
                swept.n_files, swept.n_bytes, self.directory,
            )  # fmt: skip

    def _sweep_for_ever(self) -> None:
        while not self._closing.wait(max(self.limits.stale_s / 4, 1.0)):
            try:
                self._sweep()
            except OSError as e:  # the next round may succeed; captures report their own failures
                log.error("cannot sweep the spool: %s", e)


def limits_from_environment(environment: Mapping[str, str]) -> Limits:
    """Limits from DATAGEN_CAPTURE_{PENDING_MIB,MIN_FREE_MIB,WRITERS,WAIT_S,TTL_S}. Raises ValueError."""

    def number(name: str, default: float) -> float:
        text = environment.get(f"DATAGEN_CAPTURE_{name}", "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = -1.0
        if not value > 0:
            raise ValueError(f"DATAGEN_CAPTURE_{name}={text!r} is no positive number")
        return value

    base = Limits()
    return Limits(
        pending_bytes=int(number("PENDING_MIB", base.pending_bytes / MIB) * MIB),
        min_free_bytes=int(number("MIN_FREE_MIB", base.min_free_bytes / MIB) * MIB),
        threads=int(number("WRITERS", base.threads)),
        wait_s=number("WAIT_S", base.wait_s),
        stale_s=number("TTL_S", base.stale_s),
        carried_bytes=CARRIED_BYTES,
    )
