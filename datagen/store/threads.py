"""Threads for the heavy, pure parts of a write: they leave the interpreter, so they run at once."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MAX_THREADS = 8  # more than a disk can follow


@functools.cache
def compute_threads() -> ThreadPoolExecutor:
    """One pool per process. Its tasks must not submit tasks."""
    count = min(MAX_THREADS, usable_cpus())
    return ThreadPoolExecutor(count, thread_name_prefix="store-compute")


def usable_cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs of this process: those it may run on, and at most what its container is given of them."""
    cpus = len(os.sched_getaffinity(0))
    try:
        given, period = quota.read_text().split()
    except (OSError, ValueError):  # no cgroup v2
        return cpus
    return cpus if given == "max" else max(1, min(cpus, int(given) // int(period)))
