"""A sitting on servers that fail while they are asked."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from datagen.acceptance.live import SPECULATIVE, LivePrompt
from datagen.acceptance.sitting import Sitting
from datagen.errors import MeasurementError


async def test_a_request_that_fails_is_one_line_with_its_sample_and_server() -> None:
    """Two are in flight and both fail: one of them is told, and no group of exceptions."""

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"speculative_algorithm": "EAGLE3"})

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    app = web.Application()
    app.router.add_get("/server_info", info)
    app.router.add_post("/generate", refuse)
    sitting = Sitting(tuple(LivePrompt(f"{n}-0", str(n), (1, 2), 4) for n in range(2)), (2,), (2,))
    async with TestServer(app) as server:
        with pytest.raises(MeasurementError, match=r"0-0 failed on the speculative server: .*long"):
            await sitting.one(SPECULATIVE, f"http://127.0.0.1:{server.port}")
