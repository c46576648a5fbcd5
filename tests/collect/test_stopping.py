"""A stop on request: what servers have is waited for, though not for ever, and stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from datagen.collect.job import CollectJob
from datagen.config import collect_config
from datagen.errors import Interrupted
from datagen.store.journal import Kind, read_journal
from tests.collect.harness import Bench, responses
from tests.scripted_target import app

HELD = 4


@dataclass
class Held:
    """What the server was asked while it answers no row."""

    url: str = ""
    asked: int = 0
    aborted: int = 0
    all_there: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def holding(spool: Path) -> AsyncIterator[Held]:
    held = Held()

    @web.middleware
    async def hold(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/generate":
            rid = orjson.loads(await request.read())["rid"]
            if not rid.startswith("preflight"):
                held.asked += 1
                if held.asked == HELD:
                    held.all_there.set()
                await held.go.wait()
        held.aborted += request.path == "/abort_request"
        return await handler(request)

    target = app(spool)
    target.middlewares.append(hold)
    runner = web.AppRunner(target, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    held.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield held
    finally:
        await runner.cleanup()


def answered(root: Path) -> int:
    """Responses on disk, by the journals."""
    journals = root.glob("partitions/*/journal.log")
    return sum(int((read_journal(j)["kind"] == Kind.RESPONSE).sum()) for j in journals)


async def stopped(bench: Bench, held: Held, *, drain_s: float) -> None:
    """A run that is stopped while HELD of its rows are at the server, and others wait."""
    config = collect_config(
        run=str(bench.folder / "run"), mix=str(bench.mix), target=str(bench.profile),
        tokenizer=str(bench.checkpoint), partition_prompts=5, accept_risk="boundaries",
        concurrency=HELD, max_concurrency=HELD,
    ).model_copy(update={"drain_s": drain_s})  # fmt: skip
    async with CollectJob.open(config, print) as job, asyncio.timeout(60):
        run = asyncio.create_task(job.collect_all())
        await held.all_there.wait()
        assert job.dispatcher is not None
        assert job.dispatcher.queued
        await job.stop()
        if drain_s > 60:
            await asyncio.sleep(0.5)
            assert not run.done()
            held.go.set()
        with pytest.raises(Interrupted, match="stopped on request"):
            await run


async def test_rows_at_a_server_are_finished_and_stored_though_others_wait(tmp_path: Path) -> None:
    async with holding(tmp_path / "spool") as held:
        bench = Bench.make(tmp_path, held.url, prompts=20)
        await stopped(bench, held, drain_s=1000)
        assert (held.asked, held.aborted) == (HELD, 0)
        assert answered(tmp_path / "run") == HELD
        await bench.collect_here("run")
        told = [sample for sample, _ in responses(tmp_path / "run")]
        assert len(told) == len(set(told))
        assert held.asked == 2 * len(told), "each is answered once, and captured once"


async def test_rows_that_outlast_the_wait_are_aborted(tmp_path: Path) -> None:
    async with holding(tmp_path / "spool") as held:
        bench = Bench.make(tmp_path, held.url, prompts=20)
        await stopped(bench, held, drain_s=0.2)
        assert (held.asked, held.aborted) == (HELD, HELD)
        assert answered(tmp_path / "run") == 0
