"""Encoding off the event loop: a few threads, and a short queue before them.

A capture holds its bytes of the spool's budget until its rows are stored, so what waits here keeps new
captures from being asked for: the dispatcher feels it.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from datagen.store.codecs import Encoded
from datagen.store.partition import PartitionStore

MAX_THREADS = 8  # more than a disk can follow
QUEUED_PER_THREAD = 2  # encoded samples are as large as two thirds of the captured ones


class EncodePool:
    """Samples are encoded by several threads at once; numpy and zstd leave the GIL to the others."""

    def __init__(self, threads: int | None = None) -> None:
        count = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="encode")
        self._room = asyncio.Semaphore(count * QUEUED_PER_THREAD)

    async def encode(self, store: PartitionStore, rows_TW: NDArray[np.uint16]) -> Encoded:
        """`rows_TW` as `store` keeps them; waits for its turn."""
        async with self._room:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, store.encode, rows_TW)

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        self._threads.shutdown(cancel_futures=True)
