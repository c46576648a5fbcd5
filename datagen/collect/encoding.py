"""Looking at captures and encoding them, off the event loop: threads of this process, or processes.

A capture holds its bytes of the spool's budget until its rows are stored, so what waits here keeps new
captures from being asked for: the dispatcher feels it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from datagen.store.codecs import Encoded
from datagen.store.guards import Refused, Sound, examine
from datagen.store.partition import PartitionStore
from datagen.store.states import StatesSpec
from datagen.store.threads import usable_cpus
from datagen.target.states import Captured

T = TypeVar("T")
MAX_THREADS, MAX_THREADS_WIDE = 8, 16  # more than a disk can follow
QUEUED_PER_THREAD = 2  # encoded samples are as large as two thirds of the captured ones
MAX_PROCESSES, MAX_WRITERS = 16, 4
FEWEST_CPUS = 8
CPUS_PER_WRITER = 4


class Encoders(Protocol):
    """What looks at captures and encodes them."""

    sums: bool
    """True when `examine` compares the checksum of a spool file, so that nobody else need do it."""

    async def examine(self, captured: Captured, n_tokens: int, spec: StatesSpec) -> Sound | Refused:
        """Look at every value (`store.guards.examine`). Raises SpoolError for a torn spool file."""
        ...

    async def encode(self, store: PartitionStore, captured: Captured) -> Encoded:
        """The rows as `store` keeps them; waits for its turn."""
        ...

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        ...


class EncodePool:
    """Samples are encoded by several threads at once; numpy and zstd leave the GIL to the others."""

    sums = False

    def __init__(self, threads: int | None = None) -> None:
        count = threads or min(MAX_THREADS, usable_cpus())
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="encode")
        self._room = asyncio.Semaphore(count * QUEUED_PER_THREAD)

    async def examine(self, captured: Captured, n_tokens: int, spec: StatesSpec) -> Sound | Refused:
        """On a thread of the event loop's own: what is to be examined does not wait for encoding."""
        return await asyncio.to_thread(examine, captured.rows, n_tokens, spec)

    async def encode(self, store: PartitionStore, captured: Captured) -> Encoded:
        """The rows as `store` keeps them; waits for its turn."""
        return await self.run(store.encode, captured.rows)

    async def run(
        self, function: Callable[[NDArray[np.uint16]], T], rows_TW: NDArray[np.uint16]
    ) -> T:
        """`function` of rows on one of the threads; waits for its turn."""
        async with self._room:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, function, rows_TW)

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        self._threads.shutdown(cancel_futures=True)


def processes_for(asked: int | None, *, wide: bool) -> int:
    """How many processes should encode; 0 is the threads of this one. `asked`: the user's own number.

    One process's threads take turns at the interpreter and at its memory map: at Kimi's width they came
    to 1.7 CPUs of 16, and 0.7 GB/s. A narrow capture costs less to encode than to tell of it.
    """
    if asked is not None:
        return asked
    cpus = usable_cpus()
    return min(MAX_PROCESSES, cpus * 5 // 8) if wide and cpus >= FEWEST_CPUS else 0


def threads_for(*, wide: bool) -> int:
    """How many threads should encode."""
    return min(MAX_THREADS_WIDE if wide else MAX_THREADS, usable_cpus())


def writers_for(*, wide: bool) -> int:
    """How many threads should write, each its own partitions: one sums and writes 1 GB/s."""
    return min(MAX_WRITERS, max(1, usable_cpus() // CPUS_PER_WRITER)) if wide else 1
