"""How many partitions may be open: enough to keep the servers fed, and not many more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

LOOK_EVERY_S = 0.1
MOST_OPEN = 3
"""Times what the servers hold: unfinished rows above which no partition is opened beyond the limit."""
MOST = 4
"""Times the limit that may be open when the open ones have only their longest answers left."""


class PartitionGate:
    """`admit` waits for room; `release` for each that was admitted.

    There is room while fewer than `limit()` are inside, and, up to MOST times as many, while `hungry()`:
    partitions that wait for their last rows count, but hold nothing that a free server could take.
    """

    def __init__(self, limit: Callable[[], int], hungry: Callable[[], bool]) -> None:
        self._limit, self._hungry = limit, hungry
        self._inside = 0
        self._left = asyncio.Event()

    async def admit(self) -> None:
        """Wait for room; one caller at a time."""
        while self._inside >= self._limit():
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), LOOK_EVERY_S)
                continue
            # only after a pause: the rows of the one before may not be queued yet
            if self._inside < MOST * self._limit() and self._hungry():
                break
        self._inside += 1

    def release(self) -> None:
        """One has left."""
        self._inside -= 1
        self._left.set()
