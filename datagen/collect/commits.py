"""Commits as the event loop sees them: awaited, a bounded number at once, a batch told by one wake-up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from datagen.store.group_commit import GroupCommitter, Order
from datagen.store.partition import PartitionStore

T = TypeVar("T")
MAX_QUEUED = 512
"""Rows with the writer; more than these wait here, so that a slow disk holds rows back, not the loop."""
MAX_WAITING = 256
"""Rows that wait for the disk above which no further row should be asked for."""


class Commits:
    """Group committers for coroutines, each of the stores that fall to it. Made within its event loop."""

    def __init__(self, *committers: GroupCommitter) -> None:
        self._next = itertools.cycle(committers)
        self._of: WeakKeyDictionary[PartitionStore, GroupCommitter] = WeakKeyDictionary()
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(MAX_QUEUED)
        self._waiting = 0

    @property
    def crowded(self) -> bool:
        """True while so many rows wait for the disk that more answers would only fill memory."""
        return self._waiting >= MAX_WAITING

    async def run(
        self, store: PartitionStore, action: Callable[[PartitionStore], T], *, n_bytes: int = 0
    ) -> T:
        """Run `action` on the writer thread of `store`; returns once its rows are durable.

        `n_bytes`: about what it writes. Raises its error.
        """
        self._waiting += 1
        try:
            async with self._room:
                order = Order(store, action, self._told, n_bytes, ticket=self._loop.create_future())
                committer = self._of.get(store)
                if committer is None:
                    committer = self._of[store] = next(self._next)
                committer.put(order)
                try:
                    await order.ticket
                except asyncio.CancelledError:
                    order.cancelled = True
                    raise
        finally:
            self._waiting -= 1
        if order.error is not None:
            raise order.error
        return order.result  # type: ignore[no-any-return]

    def _told(self, orders: list[Order]) -> None:
        """On the writer thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, orders)


def _wake(orders: list[Order]) -> None:
    for order in orders:
        if not order.ticket.done():
            order.ticket.set_result(None)
