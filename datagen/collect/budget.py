"""A cap on the bytes asked for and not yet stored, so that the spool can never fill up behind us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """At most `limit` bytes held at once; one holder larger than the limit is let through alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._changed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Bytes now held."""
        return self._held

    @asynccontextmanager
    async def hold(self, n_bytes: int) -> AsyncIterator[None]:
        """Wait for room for `n_bytes`, and give it back at the end."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._held == 0 or self._held + n_bytes <= self._limit
            )
            self._held += n_bytes
        try:
            yield
        finally:
            async with self._changed:
                self._held -= n_bytes
                self._changed.notify_all()
