"""A server comes back as another one: its rows are not those of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from datagen.collect.gate import PartitionGate
from datagen.errors import EndpointDown
from datagen.store.run_status import run_status
from datagen.store.verify import verify_run
from datagen.target.client import IDLE_CLOSE_S
from tests.collect.harness import Bench, responses, rows_done
from tests.scripted_target import app
from tests.tiny import CONTEXT, free_port


@asynccontextmanager
async def serving(port: int, spool: Path, revision: str) -> AsyncIterator[list[str]]:
    """A target of this revision, ended with its connections as a kill would; yields what it was asked."""
    asked: list[str] = []

    @web.middleware
    async def known(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/server_info":
            about = {"version": "0.5.23", "model_path": "tiny-llama", "dtype": "bfloat16"}
            return web.json_response(about | {"context_length": CONTEXT, "revision": revision})
        if request.path == "/generate":
            await asyncio.sleep(0.05)
        return await handler(request)

    target = app(spool)
    target.middlewares.append(known)
    runner = web.AppRunner(target, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield asked
    finally:
        await runner.cleanup()


async def test_a_server_replaced_by_another_model_gets_no_rows_of_the_run(tmp_path: Path) -> None:
    port = free_port()
    bench = Bench.make(tmp_path, f"http://127.0.0.1:{port}", prompts=16)
    root = tmp_path / "replaced"

    async def collected(patience_s: float) -> str:
        try:
            await bench.collect_here(root.name, patience_s=patience_s, concurrency=4)
        except EndpointDown as e:
            return str(e)
        return ""

    async with serving(port, tmp_path / "spool", "one") as asked:
        under_way = asyncio.create_task(collected(5))
        while not rows_done(root):
            assert not under_way.done(), under_way.result()
            await asyncio.sleep(0.02)
    assert "/generate" in asked
    await asyncio.sleep(IDLE_CLOSE_S + 0.1)
    async with serving(port, tmp_path / "spool", "two") as asked:
        said = await under_way
    assert "came back as another one, it differs in revision: two against one" in said
    assert "/server_info" in asked
    assert "/generate" not in asked
    planned = run_status(root).planned
    assert 0 < rows_done(root) < planned
    async with serving(port, tmp_path / "spool", "one"):
        assert await collected(30) == ""
    assert verify_run(root).ok
    assert len(dict(responses(root))) == planned


class Full:
    capacity, hungry = 1, False


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_wait_for_room_is_cancelled_though_room_comes_just_then(
    turns: int,
) -> None:
    gate = PartitionGate(1, Full)
    for _ in range(2):
        await gate.admit()
    waiting = asyncio.create_task(gate.admit())
    await asyncio.sleep(0.01)
    gate.release()
    for _ in range(turns):  # of the loop: what waits inside is told before what waits for it
        await asyncio.sleep(0)
    cancelled = waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() == cancelled
