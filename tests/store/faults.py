"""A writer that dies at its N-th system call, by SIGKILL or by a power cut.

A power cut takes back whatever was not synced: file content beyond the size at its last fsync, and
names in a directory that was not synced since. Run in a process of its own, which does not survive.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from datagen.store.layout import PartitionLayout, RunLayout
from datagen.store.partition import Outcome
from datagen.store.repair import repair_run
from datagen.store.responses import to_batch
from tests.store.rows import collect, open_store, prompt_id, reject, response

CALLS = (
    "open", "write", "pwrite", "fsync", "fdatasync", "replace", "ftruncate", "truncate", "unlink",
)  # fmt: skip
COUNT = 6
REJECTED = (3,)
SHARD_BYTES = 3000
to_batch([response(0)])  # what pyarrow imports with its first array is then in every fork already


class Disk:
    """What of `root` would survive a power cut."""

    def __init__(self, root: Path, shadow: Path) -> None:
        self._root, self._shadow = root, shadow
        shadow.mkdir(exist_ok=True)
        self._sizes: dict[int, int] = {}
        self._names: dict[Path, dict[str, int]] = {}
        for directory in [root, *(p for p in root.rglob("*") if p.is_dir())]:
            self._settle(directory)
        for path in root.rglob("*"):
            self._sizes[path.stat().st_ino] = path.stat().st_size

    def synced(self, fd: int) -> None:
        """`fd` has been synced: a file's content, or a directory's names."""
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self._settle(path)
        else:
            self._sizes[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def _settle(self, directory: Path) -> None:
        self._names[directory] = {p.name: p.stat().st_ino for p in directory.iterdir()}
        for path in directory.iterdir():
            link = self._shadow / str(path.stat().st_ino)
            if path.is_file() and not link.exists():
                os.link(path, link)

    def cut_power(self) -> None:
        """Take back what was not synced."""
        for directory in [self._root, *(p for p in self._root.rglob("*") if p.is_dir())]:
            if not directory.exists():
                continue
            names = self._names.get(directory, {})
            for path in list(directory.iterdir()):
                if path.is_dir():
                    if path.name not in names:
                        shutil.rmtree(path)
                else:
                    path.unlink()
            for name, inode in names.items():
                link = self._shadow / str(inode)
                if link.exists():
                    os.link(link, directory / name)
                    durable = self._sizes.get(inode, 0)
                    if link.stat().st_size > durable:
                        REAL["truncate"](link, durable)


REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS}


def arm(root: Path, at: int, *, power_cut: bool) -> Callable[[], int]:
    """Have the `at`-th call of CALLS from now on kill this process; returns the count so far."""
    disk = Disk(root, root.with_name(root.name + ".shadow")) if power_cut else None
    seen = 0

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == at:
                if name == "write":
                    REAL["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
                if disk is not None:
                    for each, real in REAL.items():
                        setattr(os, each, real)
                    disk.cut_power()
                os.kill(os.getpid(), signal.SIGKILL)
            result = REAL[name](*args, **kwargs)
            if disk is not None and name in ("fsync", "fdatasync"):
                disk.synced(args[0])
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name))
    return lambda: seen


def write_rows(root: Path, at: int, power_cut: bool, acknowledged: Connection) -> None:
    """Bring COUNT samples to their outcome, and seal; each is acknowledged once it is committed."""
    if at:
        arm(root, at, power_cut=power_cut)
    directory = root / "partitions" / "00000"
    if PartitionLayout(directory).summary.exists():
        return
    store = open_store(directory, shard_bytes=SHARD_BYTES)
    for number in range(COUNT):
        if store.outcome(prompt_id(number), 0) in (Outcome.PENDING, Outcome.RESPONDED):
            if number in REJECTED:
                reject(store, number)
            else:
                collect(store, number)
            store.commit()
        acknowledged.send_bytes(struct.pack("<I", number))
    store.seal(COUNT)
    store.close()


def repair(root: Path, at: int, power_cut: bool) -> None:
    """Repair a run."""
    if at:
        arm(root, at, power_cut=power_cut)
    repair_run(RunLayout(root), workers=1)
