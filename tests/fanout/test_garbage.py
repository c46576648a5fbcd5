"""Rows make no garbage that only the cyclic collector can free, and its settings come back."""

from __future__ import annotations

import asyncio
import gc

from datagen.fanout.dispatcher import Dispatcher
from datagen.fanout.garbage import seldom_collected
from datagen.fanout.rows import Priority, Role, Work
from datagen.fanout.server import ServerSpec
from datagen.target.client import SGLangClient
from tests.fanout.test_storms import ask, says, serving


def test_the_collectors_settings_come_back() -> None:
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collected():
        assert gc.get_threshold()[0] > usual[0]
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == frozen


async def test_answered_rows_leave_no_cycles_behind() -> None:
    rows = 300
    work = Work(ask, Role.GENERATE, Priority.FIRST_TURN, 8)
    async with (
        serving(says(b"", times=0)) as url,
        SGLangClient(url) as client,
        Dispatcher([ServerSpec(client)]) as dispatcher,
    ):
        await asyncio.gather(*(dispatcher.run(work) for _ in range(32)))  # the connections
        gc.collect()
        gc.disable()
        try:
            await asyncio.gather(*(dispatcher.run(work) for _ in range(rows)))
            found = gc.collect()
        finally:
            gc.enable()
    assert found < rows // 10, "a row in ten leaves a cycle: collections may not be put off"
