"""A measurement that is told to stop: it ends at once, and its servers with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from datagen.errors import Interrupted

T = TypeVar("T")
Stop = Callable[[], bool]
"""True once a measurement should end; asked often, by whatever thread measures."""
LOOK_EVERY_S = 0.2


def never() -> bool:
    """For measurements that nobody stops."""
    return False


def require_going(stop: Stop) -> None:
    """Raise Interrupted once `stop` says so."""
    if stop():
        raise Interrupted(
            "the measurement was stopped on request", fix="run it again: it begins anew"
        )


def run_until(stop: Stop, measurement: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, cut short once `stop` says so. Raises Interrupted then."""

    async def watched() -> T:
        task = asyncio.create_task(measurement)
        try:
            while not task.done():
                require_going(stop)
                await asyncio.wait([task], timeout=LOOK_EVERY_S)
        except BaseException:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        return task.result()

    return asyncio.run(watched())
