"""What a machine does while a benchmark runs: CPU by thread, bytes in a folder, what a disk syncs."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

TICKS = os.sysconf("SC_CLK_TCK")


def thread_seconds() -> Counter[str]:
    """CPU seconds by what threads are for: the event loop, `encode`, `group-commit`, ..."""
    found: Counter[str] = Counter()
    for thread in threading.enumerate():
        stat = Path(f"/proc/self/task/{thread.native_id}/stat")
        if stat.exists():
            fields = stat.read_text().rsplit(")", 1)[1].split()
            name = thread.name.partition("_")[0]
            found[name] += (int(fields[11]) + int(fields[12])) / TICKS
    return found


def process_seconds(pids: Iterable[int]) -> Counter[str]:
    """CPU seconds of processes, in `user` and in `system`, and their minor page faults as `faults`."""
    found: Counter[str] = Counter()
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        found["faults"] += int(fields[7])
        found["user"] += int(fields[11]) / TICKS  # type: ignore[assignment]
        found["system"] += int(fields[12]) / TICKS  # type: ignore[assignment]
    return found


@contextmanager
def most_in(folder: Path) -> Iterator[list[int]]:
    """The most bytes that files in `folder` ever took, sampled while the block runs."""
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            total = 0
            for entry in os.scandir(folder):
                try:
                    total += entry.stat().st_size
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def busy() -> float:
    """CPU seconds of the whole machine that were not idle."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / TICKS


def synced_bytes_per_s(folder: Path, shard: int, files: int, every: int = 0) -> float:
    """What the file system makes durable when `files` writers each write a shard's worth.

    Synced at the end, and every so many bytes on the way, as commits of a collector do.
    """
    block = np.random.default_rng(0).bytes(1 << 22)

    def write(path: Path) -> None:
        with open(path, "wb", buffering=0) as f:
            for number in range(1, shard // len(block) + 1):
                f.write(block)
                if every and number * len(block) % every == 0:
                    os.fdatasync(f.fileno())
            os.fdatasync(f.fileno())

    folder.mkdir(parents=True)
    threads = [threading.Thread(target=write, args=(folder / str(i),)) for i in range(files)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = files * (shard // len(block)) * len(block) / (time.perf_counter() - start)
    shutil.rmtree(folder)
    return rate


def filled_bytes_per_s(folder: Path, n_bytes: int, threads: int) -> float:
    """What files in `folder` take from so many threads at once; removed again.

    In memory, a first time is slower where a virtual machine has to ask its host for the pages.
    """
    folder.mkdir()
    block, share = memoryview(np.random.default_rng(0).bytes(16 << 20)), n_bytes // threads

    def fill(number: int) -> None:
        with open(folder / str(number), "wb", buffering=0) as file:
            for first in range(0, share, len(block)):
                file.write(block[: share - first])

    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, range(threads)))
        return share * threads / (time.perf_counter() - start)
    finally:
        shutil.rmtree(folder)


def mount_of(path: Path) -> str:
    """Type and options of the file system that holds `path`, such as `tmpfs rw,huge=within_size`."""
    found, longest = "", 0
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if (
            path.resolve().is_relative_to(point) and len(point) >= longest
        ):  # a later one hides others
            found, longest = f"{kind} {options}", len(point)
    return found
