"""Servers that misbehave on a real socket: each storm ends, in bounded time, with a stated outcome."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest

from datagen.fanout.breaker import BreakerConfig
from datagen.fanout.config import DispatchConfig
from datagen.fanout.dispatcher import Dispatcher
from datagen.fanout.endpoint import Endpoint
from datagen.fanout.pace import PaceConfig
from datagen.fanout.rows import Answered, Priority, Rejected, Role, Work
from datagen.fanout.server import ServerSpec
from datagen.target.client import Generation, SGLangClient
from datagen.target.profile import Sampling

ROWS = 24
GOOD = orjson.dumps(
    {
        "text": "yes",
        "output_ids": [7, 2],
        "meta_info": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "finish_reason": {"type": "stop", "matched": 2},
        },
    }
)
Reply = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


def http(status: str, body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def says(answer: bytes, times: int = 10**9) -> Reply:
    """The first `times` rows get `answer`, the others a good one."""

    async def reply(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answer if number < times else http("200 OK", GOOD))

    return reply


@contextlib.asynccontextmanager
async def serving(reply: Reply, *, idle_close_s: float | None = None) -> AsyncIterator[str]:
    """A keep-alive server: rows get `reply` by their number, any other path an empty 200."""
    numbers = itertools.count()
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(
            TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while not writer.is_closing():
                async with asyncio.timeout(idle_close_s):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [
                    int(line.split(":")[1])
                    for line in head.splitlines()
                    if line.lower().startswith("content-length")
                ]
                await reader.readexactly(sum(lengths))
                if head.startswith("POST /generate"):
                    await reply(next(numbers), writer)
                elif head.startswith("GET /metrics"):
                    writer.write(http("404 Not Found", b"{}"))
                else:
                    writer.write(http("200 OK", b"{}"))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def ask(endpoint: Endpoint) -> Generation:
    return await endpoint.generate(
        [1, 2, 3],
        rid=f"row-{id(object())}",
        sampling=Sampling(temperature=0.0),
        max_new_tokens=8,
        stop_token_ids=[2],
        seed=None,
    )


async def storm(
    *urls: str, rows: int = ROWS, within_s: float = 60, **settings: Any
) -> tuple[list[Answered[Generation] | BaseException], list[dict[str, Any]]]:
    config = DispatchConfig(
        **{"breaker": BreakerConfig(probe_every_s=0.02, max_probe_every_s=0.1), **settings}
    )
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(SGLangClient(url)) for url in urls]
        d = await stack.enter_async_context(Dispatcher([ServerSpec(c) for c in clients], config))
        async with asyncio.timeout(within_s):
            done = await asyncio.gather(
                *(d.run(Work(ask, Role.GENERATE, Priority.FIRST_TURN, 8)) for _ in range(rows)),
                return_exceptions=True,
            )
        return done, d.state()


def reasons(done: list[Answered[Generation] | BaseException]) -> set[str]:
    """Why rows failed; a row that was answered says `answered`."""
    named = {x.reason if isinstance(x, Rejected) else type(x).__name__ for x in done}
    return {"answered" if name == "Answered" else name for name in named}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (http("400 Bad Request", b'{"error": {"message": "no such thing"}}'), "http_400"),
        (http("422 Unprocessable", b"<html>no</html>", "text/html"), "http_422"),
        (http("200 OK", b"<html><h1>It works!</h1></html>", "text/html"), "bad_json"),
        (http("200 OK", b'{"error": {"message": "out of cheese"}}'), "malformed_answer"),
        (http("200 OK", GOOD[:-9]), "bad_json"),
    ],
)
async def test_a_storm_of_row_faults_rejects_each_row_and_spares_the_server(
    answer: bytes, reason: str
) -> None:
    async with serving(says(answer)) as url:
        done, state = await storm(url)
    assert reasons(done) == {reason}
    assert all(isinstance(x, Rejected) and x.attempts == 3 for x in done)
    assert state[0]["state"] == "closed"


async def test_a_duplicate_rid_costs_an_attempt_and_no_row() -> None:
    refused = http("400 Bad Request", b'{"error": {"message": "Duplicate request ID detected"}}')
    async with serving(says(refused, times=5)) as url:
        done, _ = await storm(url)
    assert reasons(done) == {"answered"}


@pytest.mark.parametrize("status", ["503 Service Unavailable", "429 Too Many Requests"])
async def test_a_full_server_is_waited_for_and_no_row_is_charged(status: str) -> None:
    async with serving(says(http(status, b"full"), times=8)) as url:
        done, state = await storm(url, attempts=1)
    assert reasons(done) == {"answered"}
    assert state[0]["window"] < 32


@pytest.mark.parametrize("more", ["", "Retry-After: 86400\r\n"])
async def test_a_server_that_is_full_for_ever_stops_the_run_and_rejects_nothing(more: str) -> None:
    async with serving(says(http("503 Service Unavailable", b"full", more=more))) as url:
        done, _ = await storm(url, patience_s=1.0, within_s=30)
    assert reasons(done) == {"EndpointDown"}
    assert "http_503: full" in str(done[0])


async def test_retry_after_is_honoured() -> None:
    busy = http("503 Service Unavailable", b"", more="Retry-After: 1\r\n")
    async with serving(says(busy, times=1)) as url:
        began = asyncio.get_running_loop().time()
        done, _ = await storm(url, rows=1)
        assert asyncio.get_running_loop().time() - began >= 1.0
    assert reasons(done) == {"answered"}


@pytest.mark.parametrize(
    "answer",
    [
        http("502 Bad Gateway", b"<html>nginx</html>", "text/html"),
        http("500 Internal Server Error", b"Internal Server Error", "text/plain"),
    ],
)
async def test_a_burst_of_server_errors_passes_and_no_row_is_lost(answer: bytes) -> None:
    async with serving(says(answer, times=20)) as url:
        done, _ = await storm(url, attempts=1)
    assert reasons(done) == {"answered"}


async def test_a_server_that_errs_for_ever_is_left_alone_while_another_works() -> None:
    bad = http("500 Internal Server Error", b"CUDA error", "text/plain")
    async with serving(says(bad)) as broken, serving(says(b"", times=0)) as sound:
        done, state = await storm(broken, sound, attempts=1)
    assert reasons(done) == {"answered"}
    assert state[0]["state"] != "closed"


async def test_a_body_cut_short_is_asked_for_again() -> None:
    async def cut(number: int, writer: asyncio.StreamWriter) -> None:
        whole = http("200 OK", GOOD)
        writer.write(whole[:-20] if number < 6 else whole)
        if number < 6:
            await writer.drain()
            writer.close()

    async with serving(cut) as url:
        done, _ = await storm(url, attempts=1)
    assert reasons(done) == {"answered"}


async def test_connections_closed_while_idle_cost_nothing() -> None:
    async with serving(says(b"", times=0), idle_close_s=0.05) as url, SGLangClient(url) as client:
        specs = [ServerSpec(client)]
        async with asyncio.timeout(60), Dispatcher(specs) as d:
            for _ in range(10):
                work = Work(ask, Role.GENERATE, Priority.FIRST_TURN, 8)
                done = await asyncio.gather(*(d.run(work) for _ in range(8)))
                assert all(a.attempts == 1 for a in done)
                await asyncio.sleep(0.045)
            assert d.state()[0]["state"] == "closed"


async def test_a_connection_that_is_reset_under_a_row_costs_nothing() -> None:
    """As uvicorn's after a handler that raised: the answer goes out, and then the connection dies."""

    async def reset(number: int, writer: asyncio.StreamWriter) -> None:
        if number % 2:
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()
        else:
            writer.write(http("200 OK", GOOD))

    async with serving(reset) as url, SGLangClient(url) as client:
        for _ in range(6):
            assert (await ask(client)).output_ids.tolist() == [7, 2]


SHORT = PaceConfig(row_timeout_s=1.0)


async def test_a_server_that_never_answers_loses_its_rows_to_another() -> None:
    async def never(number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with serving(never) as hung, serving(says(b"", times=0)) as sound:
        done, state = await storm(hung, sound, pace=SHORT)
    assert reasons(done) == {"answered"}
    assert {x.endpoint for x in done if isinstance(x, Answered)} == {sound}
    assert state[0]["failures"]["row_timeout"] >= 1


async def test_a_byte_now_and_then_is_no_answer() -> None:
    async def loris(number: int, writer: asyncio.StreamWriter) -> None:
        for byte in http("200 OK", GOOD):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)

    async with serving(loris) as slow, serving(says(b"", times=0)) as sound:
        done, _ = await storm(slow, sound, pace=SHORT)
    assert reasons(done) == {"answered"}


async def test_a_server_that_is_not_authorised_to_answer_stops_the_run_and_rejects_nothing() -> (
    None
):
    refused = http("401 Unauthorized", b'{"error": "API key"}')
    async with serving(says(refused)) as url:
        done, _ = await storm(url, patience_s=0.5)
    assert reasons(done) == {"EndpointDown"}
    assert "http_401" in str(done[0])
