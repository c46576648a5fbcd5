"""How many partitions may be open: a limit that follows the servers' windows while they grow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

LOOK_EVERY_S = 0.5


class PartitionGate:
    """`admit` waits until fewer than `limit()` are inside; `release` for each that was admitted."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._inside = 0
        self._left = asyncio.Event()

    async def admit(self) -> None:
        """Wait for room; one caller at a time."""
        while self._inside >= self._limit():
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), LOOK_EVERY_S)
        self._inside += 1

    def release(self) -> None:
        """One has left."""
        self._inside -= 1
        self._left.set()
