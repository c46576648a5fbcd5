"""How many partitions may be open: enough to keep the servers fed, and not many more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

LOOK_EVERY_S = 0.1
MOST = 4
"""Times the limit that may be open when the open ones have only their longest answers left."""
MOST_OPEN = 3
"""Times what the servers hold: unfinished rows above which no partition is opened beyond the limit."""


class Fed(Protocol):
    """What the gate must know of a dispatcher."""

    @property
    def capacity(self) -> int:
        """Rows that all servers together may hold."""
        ...

    @property
    def hungry(self) -> bool:
        """True when a server could soon stand idle."""
        ...


class PartitionGate:
    """`admit` waits for room; `release` for each that was admitted.

    There is room while the open partitions are fewer than the servers' windows need, and one, and, up to
    MOST times as many, while servers could soon stand idle and few rows are unfinished: partitions that
    wait for their last rows count, but hold nothing that a free server could take.
    """

    def __init__(self, rows: int, servers: Callable[[], Fed]) -> None:
        """`rows`: of a partition. `servers`: asked whenever somebody waits."""
        self._rows, self._servers = rows, servers
        self._inside = self._unfinished = 0
        self._left = asyncio.Event()

    async def admit(self) -> None:
        """Wait for room; one caller at a time."""
        while self._inside >= self._limit:
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):  # wait_for can lose a cancellation
                    await self._left.wait()
                continue
            # only after a pause: the rows of the one before may not be queued yet
            if self._inside < MOST * self._limit and self._wanted:
                break
        self._inside += 1

    def opened(self, rows: int) -> None:
        """A partition begins, of so many rows."""
        self._unfinished += rows

    def ended(self, _: object = None) -> None:
        """One row has its outcome, or was given up; fit for `Task.add_done_callback`."""
        self._unfinished -= 1

    def release(self) -> None:
        """One has left."""
        self._inside -= 1
        self._left.set()

    @property
    def _limit(self) -> int:
        return max(2, -(-self._servers().capacity // self._rows) + 1)

    @property
    def _wanted(self) -> bool:
        servers = self._servers()
        return servers.hungry and self._unfinished < MOST_OPEN * servers.capacity
