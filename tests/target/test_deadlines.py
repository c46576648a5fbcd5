"""Time limits of many rows at once."""

from __future__ import annotations

import asyncio

import pytest

from datagen.target.deadlines import Deadlines


async def test_a_block_that_takes_too_long_is_ended_and_a_quick_one_is_not() -> None:
    deadlines = Deadlines()

    async def block(limit_s: float, takes_s: float) -> str:
        try:
            with deadlines.within(limit_s):
                await asyncio.sleep(takes_s)
        except TimeoutError:
            return "late"
        return "done"

    said = await asyncio.gather(*(block(n % 2 * 300 + 0.05, 0.5) for n in range(100)))
    assert said == ["late", "done"] * 50


async def test_the_inner_of_two_limits_does_not_say_that_the_outer_is_over() -> None:
    deadlines = Deadlines()
    with deadlines.within(30) as outer:
        with pytest.raises(TimeoutError), deadlines.within(0.01) as inner:
            await asyncio.sleep(30)
        assert (inner.expired, outer.expired) == (True, False)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        await asyncio.sleep(0)  # the task goes on


async def test_a_cancellation_by_others_stays_one_even_when_the_time_is_over_too() -> None:
    deadlines = Deadlines()

    async def block() -> None:
        with deadlines.within(0.0):
            await asyncio.sleep(30)

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    deadlines._look()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_limit_holds_in_a_later_event_loop_too() -> None:
    """A client may be entered again: the timer of a loop that has ended fires no more."""
    deadlines = Deadlines()

    async def block(limit_s: float, takes_s: float) -> None:
        with deadlines.within(limit_s):
            await asyncio.sleep(takes_s)

    asyncio.run(block(30, 0))
    with pytest.raises(TimeoutError):
        asyncio.run(block(0.05, 60))


async def test_no_timer_runs_while_no_block_is_open() -> None:
    deadlines = Deadlines()
    with deadlines.within(5):
        pass
    async with asyncio.timeout(60):
        while deadlines._timer is not None:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
