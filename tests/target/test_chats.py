"""By what route a server renders conversations, and what is asked again over a connection that died."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from datagen.target.chat import CHAT, TOKENIZE, Chats
from datagen.target.client import SGLangClient, Timeouts
from datagen.target.failures import EndpointFailure, RequestFailure, RowFailure
from datagen.target.profile import Sampling
from tests.tiny import free_port

HELLO = [{"role": "user", "content": "Hello"}]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
IDS = {"choices": [{"prompt_token_ids": [1, 2, 3]}]}


@asynccontextmanager
async def serving(
    tokenize: Handler, chat: Handler, asked: list[str]
) -> AsyncIterator[SGLangClient]:
    @web.middleware
    async def known(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked.append(request.path)
        return await handler(request)

    routes = web.Application(middlewares=[known])
    routes.router.add_post(TOKENIZE, tokenize)
    routes.router.add_post(CHAT, chat)
    timeouts = Timeouts(control=0.5, row=2.0)
    async with (
        TestServer(routes) as server,
        SGLangClient(str(server.make_url("")), timeouts=timeouts) as client,
    ):
        yield client


def says(status: int, body: object = None) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body or {"error": {"message": f"said {status}"}}, status=status)

    return handler


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 422, 429, 501, 502, 503, 504])
async def test_only_a_500_has_a_chat_asked_in_place_of_the_tokenize_route(status: int) -> None:
    asked: list[str] = []
    async with serving(says(status), says(200, IDS), asked) as client:
        with pytest.raises(RequestFailure, match=f"http_{status}"):
            await client.render(HELLO, None, {})
        assert client.chats.route == TOKENIZE
    assert asked == [TOKENIZE]


async def test_a_tokenize_route_that_hangs_is_no_reason_for_chats() -> None:
    async def hangs(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError

    asked: list[str] = []
    async with serving(hangs, says(200, IDS), asked) as client:
        with pytest.raises(EndpointFailure, match=r"no answer of /v1/tokenize in 0 s|in 1 s"):
            await client.render(HELLO, None, {})
    assert asked == [TOKENIZE]


async def test_one_500_is_asked_again_and_two_are_believed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for failures, route, expected in ((1, TOKENIZE, [7]), (2, CHAT, [1, 2, 3])):
        left = [failures]

        async def tokenize(_: web.Request, left: list[int] = left) -> web.Response:
            left[0] -= 1
            status = 500 if left[0] >= 0 else 200
            return web.json_response({"tokens": [7]}, status=status)

        asked: list[str] = []
        async with serving(tokenize, says(200, IDS), asked) as client:
            for _ in range(3):
                assert await client.render(HELLO, None, {}) == expected
            assert client.chats.route == route
        assert asked.count(TOKENIZE) == (4 if failures == 1 else 2)
        assert asked.count(CHAT) == (0 if failures == 1 else 3)
    assert caplog.text.count("contexts are rendered by chats of one token") == 1


async def test_the_chat_is_of_one_token_and_of_the_same_conversation() -> None:
    bodies: list[tuple[str, object, float]] = []

    async def ask(path: str, body: object, within_s: float) -> object:
        bodies.append((path, body, within_s))
        if path == TOKENIZE:
            raise EndpointFailure("http_500", "Internal Server Error")
        return IDS

    chats = Chats(ask, control_s=3.0, row_s=70.0)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert await chats.render(HELLO, tools, {"thinking": True}) == [1, 2, 3]
    shared = {"messages": HELLO, "tools": tools, "chat_template_kwargs": {"thinking": True}}
    one = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
    assert bodies == [
        (TOKENIZE, shared, 3.0), (TOKENIZE, shared, 3.0), (CHAT, {**shared, **one}, 70.0)
    ]  # fmt: skip


async def test_connections_that_all_die_when_they_are_used_again_cost_one_ask_each() -> None:
    """As uvicorn's after handlers that raised: the second ask must not be another of them."""
    used: set[object] = set()

    async def chat(request: web.Request) -> web.Response:
        if request.transport in used:
            reset(request)
        used.add(request.transport)
        await asyncio.sleep(0.02)  # so that each of the first has a connection of its own
        return web.json_response(IDS)

    asked: list[str] = []
    async with serving(says(404), chat, asked) as client:
        await asyncio.gather(*(client.chats.prompt_ids(HELLO, None, {}) for _ in range(8)))
        for _ in range(4):
            assert await client.chats.prompt_ids(HELLO, None, {}) == [1, 2, 3]
    assert len(asked) == 8 + 2 * 4


async def row(client: SGLangClient) -> None:
    await client.generate(
        [1, 2],
        rid="r",
        sampling=Sampling(temperature=0.0),
        max_new_tokens=4,
        stop_token_ids=[2],
        seed=None,
    )


async def test_a_refused_connection_is_no_row_of_a_server_that_died() -> None:
    async with SGLangClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(EndpointFailure) as caught:
            await row(client)
    assert caught.value.reason == "unreachable"
    assert not caught.value.in_flight


def reset(request: web.Request) -> None:
    transport = request.transport
    assert transport is not None
    at_once = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    transport.abort()


@pytest.mark.parametrize(
    ("status", "said", "reason", "kind"),
    [
        (500, "broken", "http_500", EndpointFailure),
        (401, "no key", "http_401", EndpointFailure),
        (400, "no such thing", "http_400", RowFailure),
        (400, "Duplicate request ID detected: r", "connection_lost", EndpointFailure),
    ],
)
async def test_what_the_second_ask_is_answered_stays_what_it_is(
    status: int, said: str, reason: str, kind: type[RequestFailure]
) -> None:
    n = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal n
        n += 1
        if n == 1:
            reset(request)
        return web.json_response({"error": {"message": said}}, status=status)

    routes = web.Application()
    routes.router.add_post("/generate", generate)
    async with TestServer(routes) as server, SGLangClient(str(server.make_url(""))) as client:
        with pytest.raises(kind) as caught:
            await row(client)
    assert (caught.value.reason, n) == (reason, 2)
    assert said in str(caught.value)
