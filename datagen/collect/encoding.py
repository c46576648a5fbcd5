"""Encoding off the event loop: numpy, the compiled loops and zstd leave the interpreter to other threads.

A capture holds its bytes of the spool's budget until its rows are stored, so what waits here keeps new
captures from being asked for: the dispatcher feels it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from datagen.store.codecs import Encoded
from datagen.store.threads import usable_cpus

MAX_THREADS, MAX_THREADS_WIDE = 8, 16  # more than a disk can follow
QUEUED_PER_THREAD = 2  # encoded samples are as large as two thirds of the captured ones
MAX_WRITERS, CPUS_PER_WRITER = 8, 2
TURN_S = 0.0005


class EncodePool:
    """A number of threads, and a bound on what waits for them. Made within the event loop of its run."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._room = asyncio.Semaphore(threads * QUEUED_PER_THREAD)

    async def encode(
        self, encoder: Callable[[NDArray[np.uint16]], Encoded], rows_TW: NDArray[np.uint16]
    ) -> Encoded:
        """What `encoder` makes of the rows; waits for its turn."""
        async with self._room:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, encoder, rows_TW)

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        self._threads.shutdown(cancel_futures=True)


def threads_for(*, wide: bool) -> int:
    """How many threads should encode."""
    return min(MAX_THREADS_WIDE if wide else MAX_THREADS, usable_cpus())


def writers_for(*, wide: bool) -> int:
    """How many threads should write, each its own partitions: one sums and writes 1 GB/s."""
    return min(MAX_WRITERS, max(1, usable_cpus() // CPUS_PER_WRITER)) if wide else 1


@contextmanager
def short_turns() -> Iterator[None]:
    """Threads that want the interpreter's lock get it within `TURN_S`, not the usual 5 ms.

    Wide samples pass some thirty threads which need it for a moment each, between long stretches without.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, TURN_S))
    try:
        yield
    finally:
        if usual > TURN_S:  # else another run has them short already, and ends them
            sys.setswitchinterval(usual)
