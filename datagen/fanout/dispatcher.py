"""One queue, many servers: a row is bound to a server only when that server has a free slot.

Failures are of three kinds. Of the row: it is tried again elsewhere up to `attempts` times, then
rejected with its reason. Of capacity: the window shrinks and the row waits, uncharged. Of the
endpoint: its breaker opens and its rows go back to the front, uncharged; a row that was in flight
at `deaths` server deaths is rejected as the suspected cause.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, TypeVar

from pydantic import Field

from datagen.errors import EndpointDown, Interrupted
from datagen.fanout.breaker import Breaker, BreakerConfig
from datagen.fanout.endpoint import Endpoint
from datagen.fanout.window import Window, WindowConfig
from datagen.strict import StrictModel
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure

T = TypeVar("T")
TICK_S = 0.2
CAPACITY_PAUSE_S = 0.5


class DispatchConfig(StrictModel):
    """How rows are fanned out. Nothing here changes what is collected."""

    window: WindowConfig = WindowConfig()
    breaker: BreakerConfig = BreakerConfig()
    attempts: int = Field(default=3, ge=1)
    deaths: int = Field(default=3, ge=1)
    patience_s: float = Field(default=300.0, gt=0)
    """Seconds without any server alive before the run stops; what is collected stays."""


class Priority(IntEnum):
    """Rows nearest to completion first, so that partitions close and the spool stays short."""

    CAPTURE = 0
    NEXT_TURN = 1
    FIRST_TURN = 2


class Rejected(Exception):
    """A row cannot be collected; `reason` goes into the books."""

    def __init__(self, reason: str, detail: str, attempts: int) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.attempts = reason, detail, attempts


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """A row's answer, where it came from and what it took (seconds in our queue, in the server)."""

    value: T
    endpoint: str
    attempts: int
    queue_s: float
    server_s: float


@dataclass(slots=True)
class _Row:
    call: Callable[[Endpoint], Awaitable[Any]]
    priority: Priority
    order: int
    queued_at: float
    future: asyncio.Future[Answered[Any]]
    attempts: int = 0
    deaths: int = 0
    not_before: float = 0.0
    avoid: str | None = None
    flight: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Server:
    endpoint: Endpoint
    window: Window
    breaker: Breaker
    paused_until: float = 0.0
    probing: asyncio.Task[None] | None = None
    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Dispatcher:
    """Feeds every open partition's rows to the servers. An async context manager; one per process."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        config: DispatchConfig | None = None,
        *,
        server_limits: dict[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or DispatchConfig()
        self._clock = clock
        limits = server_limits or {}
        self._servers = [
            _Server(
                e,
                Window(self._config.window, server_limit=limits.get(e.url)),
                Breaker(self._config.breaker),
            )
            for e in endpoints
        ]
        self._queue: list[tuple[int, int, _Row]] = []
        self._orders = itertools.count()
        self._flights: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._stopped: BaseException | None = None

    async def __aenter__(self) -> Dispatcher:
        self._ticker = asyncio.create_task(self._tick(), name="dispatcher")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop(Interrupted("the run is closing"))
        tasks = [*self._flights, *(s.probing for s in self._servers if s.probing)]
        if self._ticker:
            tasks.append(self._ticker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def capacity(self) -> int:
        """Rows that all live servers together may hold."""
        return sum(s.window.size for s in self._servers)

    @property
    def in_flight(self) -> int:
        """Rows now at a server."""
        return len(self._flights)

    def state(self) -> list[dict[str, Any]]:
        """One record per endpoint: url, state, window, running, answered, failures by reason."""
        return [
            {
                "url": s.endpoint.url,
                "state": s.breaker.state.value,
                "window": s.window.size,
                "running": s.window.in_flight,
                "answered": s.answered,
                "failures": dict(s.failures),
            }
            for s in self._servers
        ]

    async def run(
        self, call: Callable[[Endpoint], Awaitable[T]], priority: Priority
    ) -> Answered[T]:
        """Have some server answer `call`.

        Raises Rejected when the row cannot be collected, EndpointDown when no server has been
        alive for `patience_s`, Interrupted once the run is stopping.
        """
        if self._stopped is not None:
            raise self._stopped
        row = _Row(
            call,
            priority,
            next(self._orders),
            self._clock(),
            asyncio.get_running_loop().create_future(),
        )
        self._push(row)
        self._pump()
        try:
            return await row.future
        except asyncio.CancelledError:
            row.future.cancel()  # a queued row is skipped when popped
            if row.flight is not None:
                row.flight.cancel()  # the client aborts the request on the server
            raise

    def stop(self, why: BaseException) -> None:
        """Send nothing more: queued rows fail with `why`, rows at a server may still finish."""
        self._stopped = self._stopped or why
        queued, self._queue = self._queue, []
        for _, _, row in queued:
            if not row.future.done():
                row.future.set_exception(self._stopped)

    # -- inside --------------------------------------------------------------------------------

    def _push(self, row: _Row) -> None:
        if self._stopped is not None:
            if not row.future.done():
                row.future.set_exception(self._stopped)
            return
        heapq.heappush(self._queue, (row.priority, row.order, row))

    def _pump(self) -> None:
        """Send rows while a live server has room."""
        now = self._clock()
        later: list[_Row] = []
        while self._queue:
            open_servers = [
                s
                for s in self._servers
                if s.breaker.closed and s.window.free and now >= s.paused_until
            ]
            if not open_servers:
                break
            row = heapq.heappop(self._queue)[2]
            if row.future.done():
                continue
            if row.not_before > now:
                later.append(row)
                continue
            elsewhere = [s for s in open_servers if s.endpoint.url != row.avoid]
            server = min(elsewhere or open_servers, key=lambda s: s.window.load)
            server.window.admit()
            row.flight = asyncio.create_task(self._fly(row, server))
            self._flights.add(row.flight)
            row.flight.add_done_callback(self._flights.discard)
        for row in later:
            heapq.heappush(self._queue, (row.priority, row.order, row))

    async def _fly(self, row: _Row, server: _Server) -> None:
        sent_at = self._clock()
        try:
            value = await row.call(server.endpoint)
        except RowFailure as e:
            server.breaker.answered()
            self._row_failed(row, server, e)
        except CapacityFailure as e:
            server.failures[e.reason] += 1
            server.window.pressed()
            server.paused_until = self._clock() + CAPACITY_PAUSE_S
            self._push(row)
        except EndpointFailure as e:
            self._endpoint_failed(row, server, e)
        except Exception as e:  # noqa: BLE001 - whatever it is belongs to the one who asked
            if not row.future.done():
                row.future.set_exception(e)
        else:
            server.breaker.answered()
            server.window.succeeded()
            server.answered += 1
            if not row.future.done():
                now = self._clock()
                row.future.set_result(
                    Answered(
                        value,
                        server.endpoint.url,
                        row.attempts + 1,
                        sent_at - row.queued_at,
                        now - sent_at,
                    )
                )
        finally:
            server.window.release()
            self._pump()

    def _row_failed(self, row: _Row, server: _Server, e: RowFailure) -> None:
        server.failures[e.reason] += 1
        row.attempts += 1
        if e.permanent or row.attempts >= self._config.attempts:
            self._reject(row, e.reason, e.detail)
        else:
            row.avoid = server.endpoint.url
            row.not_before = self._clock() + 0.05 * 2**row.attempts
            self._push(row)

    def _endpoint_failed(self, row: _Row, server: _Server, e: EndpointFailure) -> None:
        server.failures[e.reason] += 1
        fatal = e.reason in ("unreachable", "connection_lost")
        server.breaker.failed(self._clock(), str(e), fatal=fatal)
        if e.in_flight:
            row.deaths += 1
        if row.deaths >= self._config.deaths:
            self._reject(
                row, "server_died_thrice", f"in flight at {row.deaths} failures, last: {e}"
            )
        else:
            row.avoid = server.endpoint.url
            self._push(row)

    def _reject(self, row: _Row, reason: str, detail: str) -> None:
        if not row.future.done():
            row.future.set_exception(Rejected(reason, detail, max(row.attempts, row.deaths)))

    async def _tick(self) -> None:
        while True:
            now = self._clock()
            for server in self._servers:
                if server.breaker.probe_due(now) and server.probing is None:
                    server.probing = asyncio.create_task(self._probe(server))
            waits = [s.breaker.open_for(now) for s in self._servers]
            if waits and min(waits) > self._config.patience_s and self._queue:
                worst = max(self._servers, key=lambda s: s.breaker.open_for(now))
                self.stop(
                    EndpointDown(
                        f"no server has answered for {min(waits):.0f} s; last: "
                        f"{worst.breaker.last_failure}",
                        where=", ".join(s.endpoint.url for s in self._servers),
                        fix="start it again and repeat the command: nothing collected is lost",
                    )
                )
            self._pump()
            await asyncio.sleep(TICK_S)

    async def _probe(self, server: _Server) -> None:
        try:
            healthy = await server.endpoint.healthy()
        except TimeoutError:
            healthy = False
        finally:
            server.probing = None
        server.breaker.probed(self._clock(), healthy=healthy)
        self._pump()
