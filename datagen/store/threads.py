"""Threads for the heavy, pure parts of a write: they leave the interpreter, so they run at once."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

MAX_THREADS = 8  # more than a disk can follow


@functools.cache
def compute_threads() -> ThreadPoolExecutor:
    """One pool per process. Its tasks must not submit tasks."""
    count = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(count, thread_name_prefix="store-compute")
