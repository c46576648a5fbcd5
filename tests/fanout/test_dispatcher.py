"""Rows over scripted servers: who gets them, and what becomes of them when a server misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from datagen.errors import EndpointDown, Interrupted
from datagen.fanout.breaker import Breaker, BreakerConfig
from datagen.fanout.config import DispatchConfig
from datagen.fanout.dispatcher import TICK_S, Dispatcher
from datagen.fanout.rows import Priority, Rejected, Role, Work
from datagen.fanout.server import ServerSpec
from datagen.fanout.window import Window, WindowConfig
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure

FAST = BreakerConfig(probe_every_s=0.01)


class Scripted:
    """An endpoint whose answers are a function of the call's number."""

    def __init__(self, url: str, answer: Callable[[int], Awaitable[Any]]) -> None:
        self.url, self._answer = url, answer
        self.calls = self.running = self.peak = 0
        self.alive = True

    async def healthy(self) -> bool:
        return self.alive

    async def load(self) -> None:
        return None

    async def ask(self) -> Any:
        self.calls += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._answer(self.calls)
        finally:
            self.running -= 1

    generate = capture = None  # rows here call `ask`


async def ok(_: int) -> str:
    await asyncio.sleep(0.001)
    return "ok"


def fails_first(times: int, error: Exception) -> Callable[[int], Awaitable[str]]:
    async def answer(call: int) -> str:
        await asyncio.sleep(0)
        if call <= times:
            raise error
        return "ok"

    return answer


def dispatcher(*servers: Scripted, **config: Any) -> Dispatcher:
    specs = [ServerSpec(s) for s in servers]  # type: ignore[arg-type]
    return Dispatcher(specs, DispatchConfig(**{"breaker": FAST, **config}))


def ask(endpoint: Any) -> Awaitable[Any]:
    return endpoint.ask()


def row(call: Any = ask, priority: Priority = Priority.FIRST_TURN, **more: Any) -> Work[Any]:
    return Work(call, Role.GENERATE, priority, **more)


async def test_every_row_is_answered_and_no_window_is_exceeded() -> None:
    a, b = Scripted("a", ok), Scripted("b", ok)
    async with dispatcher(a, b, window=WindowConfig(initial=4, maximum=4)) as d:
        answers = await asyncio.gather(*(d.run(row()) for _ in range(100)))
    assert [x.value for x in answers] == ["ok"] * 100
    assert a.calls + b.calls == 100
    assert a.peak <= 4
    assert b.peak <= 4
    assert min(a.calls, b.calls) > 20


async def test_a_slow_server_does_not_hold_back_a_fast_one() -> None:
    others_done = asyncio.Event()

    async def quick(call: int) -> str:
        if call == 58:
            others_done.set()
        return await ok(call)

    async def slow(_: int) -> str:
        await others_done.wait()
        return "slow"

    fast, tired = Scripted("fast", quick), Scripted("tired", slow)
    async with dispatcher(fast, tired, window=WindowConfig(initial=2, maximum=2)) as d:
        async with asyncio.timeout(60):
            await asyncio.gather(*(d.run(row()) for _ in range(60)))
    assert (fast.calls, tired.calls) == (58, 2)


async def test_nothing_is_sent_while_rows_are_held_back() -> None:
    server, full = Scripted("a", ok), True
    async with Dispatcher([ServerSpec(server)], held=lambda: full) as d:  # type: ignore[arg-type]
        asked = [asyncio.create_task(d.run(row())) for _ in range(3)]
        await asyncio.sleep(2 * TICK_S)
        assert (server.calls, d.queued) == (0, 3)
        full = False
        await asyncio.wait_for(asyncio.gather(*asked), 60)


async def test_a_server_is_not_given_up_while_nothing_may_be_sent_to_it() -> None:
    """What is full for a moment cannot show that it has room again."""
    held = False

    async def full_once(call: int) -> str:
        nonlocal held
        if call == 1:
            held = True
            raise CapacityFailure("http_503", "full", retry_after_s=0.01)
        return "ok"

    server = Scripted("a", full_once)
    specs = [ServerSpec(server)]  # type: ignore[arg-type]
    config = DispatchConfig(breaker=FAST, patience_s=3 * TICK_S)
    async with Dispatcher(specs, config, held=lambda: held) as d:
        asked = asyncio.create_task(d.run(row()))
        await asyncio.sleep(6 * TICK_S)
        assert (server.calls, asked.done()) == (1, False)
        held = False
        assert (await asyncio.wait_for(asked, 60)).value == "ok"


async def test_a_row_at_fault_is_tried_again_and_then_rejected_with_its_reason() -> None:
    server = Scripted("a", fails_first(99, RowFailure("bad_json", "<html>")))
    async with dispatcher(server, attempts=3) as d:
        with pytest.raises(Rejected, match="bad_json") as rejected:
            await d.run(row())
    assert (rejected.value.reason, rejected.value.attempts, server.calls) == ("bad_json", 3, 3)


async def test_a_permanent_fault_costs_one_request() -> None:
    error = RowFailure("over_context", "too long", permanent=True)
    server = Scripted("a", fails_first(99, error))
    async with dispatcher(server) as d:
        with pytest.raises(Rejected, match="over_context"):
            await d.run(row())
    assert server.calls == 1


async def test_a_storm_of_bad_rows_does_not_open_the_breaker() -> None:
    error = RowFailure("http_400", "no", permanent=True)
    server = Scripted("a", fails_first(50, error))
    async with dispatcher(server, window=WindowConfig(initial=1)) as d:
        done = await asyncio.gather(*(d.run(row()) for _ in range(51)), return_exceptions=True)
        assert d.state()[0]["state"] == "closed"
    assert sum(isinstance(x, Rejected) for x in done) == 50


async def test_a_full_server_shrinks_its_window_and_charges_no_row() -> None:
    server = Scripted("a", fails_first(3, CapacityFailure("http_503", "full")))
    async with dispatcher(server, window=WindowConfig(initial=8), attempts=1) as d:
        answer = await d.run(row())
        assert d.state()[0]["window"] < 8
    assert answer.value == "ok"
    assert answer.attempts == 1


async def test_rows_of_a_dead_server_go_to_the_living_uncharged() -> None:
    dead = Scripted("dead", fails_first(99, EndpointFailure("unreachable", "", in_flight=False)))
    dead.alive = False
    living = Scripted("living", ok)
    async with dispatcher(dead, living, attempts=1) as d:
        answers = await asyncio.gather(*(d.run(row()) for _ in range(40)))
    assert {x.endpoint for x in answers} == {"living"}
    assert dead.calls <= 32, "its breaker kept the rest away"


async def test_a_server_that_comes_back_gets_rows_again() -> None:
    server = Scripted("a", fails_first(2, EndpointFailure("connection_lost")))
    async with dispatcher(server, window=WindowConfig(initial=1)) as d:
        answers = await asyncio.gather(*(d.run(row()) for _ in range(5)))
    assert [x.value for x in answers] == ["ok"] * 5


async def test_a_row_that_kills_its_server_is_found_and_the_innocent_are_collected() -> None:
    killer, alone = 7, []

    def call(number: int) -> Callable[[Any], Awaitable[Any]]:
        async def ask_one(endpoint: Any) -> Any:
            endpoint.running += 1
            try:
                await asyncio.sleep(0.005)
                if number == killer:
                    alone.append(endpoint.running == 1)
                    endpoint.deadly.set()
                if endpoint.deadly.is_set():
                    await asyncio.sleep(0)  # every row in flight sees the connection go
                    raise EndpointFailure("connection_lost")
                return number
            finally:
                endpoint.running -= 1
                if not endpoint.running:
                    endpoint.deadly.clear()  # started again

        return ask_one

    server = Scripted("a", ok)
    server.deadly = asyncio.Event()  # type: ignore[attr-defined]
    async with dispatcher(server, window=WindowConfig(initial=8, maximum=8)) as d:
        done = await asyncio.gather(
            *(d.run(row(call(n))) for n in range(20)), return_exceptions=True
        )
    failed = [n for n, x in enumerate(done) if isinstance(x, Exception)]
    assert failed == [killer]
    assert isinstance(done[killer], Rejected)
    assert done[killer].reason == "killed_its_server"
    assert len(alone) == 4, "three deaths in company"
    assert alone[-1], "and one alone, which proves it"


async def test_the_run_stops_when_no_server_has_lived_for_long_enough() -> None:
    server = Scripted("a", fails_first(99, EndpointFailure("unreachable", "", in_flight=False)))
    server.alive = False
    async with dispatcher(server, patience_s=0.3) as d:
        with pytest.raises(EndpointDown, match="nothing collected is lost"):
            await asyncio.wait_for(d.run(row()), 60)


async def test_the_run_stops_when_nobody_is_left_to_capture_though_others_generate() -> None:
    writer, dead = Scripted("writer", ok), Scripted("dead", ok)
    dead.alive = False
    dead._answer = fails_first(99, EndpointFailure("unreachable", "refused", in_flight=False))
    specs = [ServerSpec(writer, Role.GENERATE), ServerSpec(dead, Role.CAPTURE)]  # type: ignore[arg-type]
    async with Dispatcher(specs, DispatchConfig(breaker=FAST, patience_s=0.5)) as d:
        capture = Work(ask, Role.CAPTURE, Priority.CAPTURE)
        first = asyncio.create_task(d.run(capture))
        assert (await d.run(row())).value == "ok"
        with pytest.raises(EndpointDown, match=r"no server has answered.*refused \(dead\)"):
            await asyncio.wait_for(first, 60)


async def test_captures_go_before_new_conversations() -> None:
    order: list[str] = []

    def named(name: str) -> Callable[[Any], Awaitable[None]]:
        async def call(_: Any) -> None:
            order.append(name)
            await asyncio.sleep(0.001)

        return call

    async with dispatcher(Scripted("a", ok), window=WindowConfig(initial=1, maximum=1)) as d:
        await asyncio.gather(
            *(d.run(row(named("new"))) for _ in range(3)),
            d.run(row(named("capture"), Priority.CAPTURE)),
        )
    assert order == ["new", "capture", "new", "new"]


async def test_stopping_finishes_what_is_in_flight_and_fails_what_waits() -> None:
    server = Scripted("a", ok)
    async with dispatcher(server, window=WindowConfig(initial=1, maximum=1)) as d:
        rows = [asyncio.create_task(d.run(row())) for _ in range(3)]
        await asyncio.sleep(0)
        d.stop(Interrupted("stopped"), drain_s=60)
        done = await asyncio.gather(*rows, return_exceptions=True)
    assert sum(isinstance(x, Interrupted) for x in done) == 2
    assert server.calls == 1


def test_a_window_grows_only_while_it_is_full_and_never_past_the_servers_limit() -> None:
    window = Window(WindowConfig(initial=2, growth_after=1), limit=3)
    window.succeeded()
    assert window.size == 2
    for _ in range(5):
        window.in_flight = window.size
        window.succeeded()
    assert window.size == 3


def test_pressure_never_closes_a_window() -> None:
    window = Window(WindowConfig(initial=16))
    for _ in range(50):
        window.pressed()
    assert window.size == 1


def test_a_breaker_opens_after_three_failures_and_closes_on_a_healthy_probe() -> None:
    breaker = Breaker(BreakerConfig(failures=3, probe_every_s=1.0))
    for now in (0.0, 1.0):
        breaker.failed(now, "http_500", fatal=False)
    assert breaker.closed
    breaker.failed(2.0, "http_500", fatal=False)
    assert not breaker.closed
    assert breaker.probe_due(2.0)
    breaker.probed(2.0, healthy=False)
    assert not breaker.probe_due(2.5)
    assert breaker.open_for(5.0) == 3.0
    breaker.probed(5.0, healthy=True)
    assert breaker.closed, "it was gone, so it is a new process"
