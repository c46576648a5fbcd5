"""One queue, many servers: a row is bound to a server only when that server has a free slot.

Failures are of three kinds. Of the row: it is tried again elsewhere up to `attempts` times, then
rejected with its reason. Of capacity: the window shrinks and the row waits, uncharged. Of the
endpoint: its breaker opens and its rows go back to the front, uncharged; a row that was in flight
at `deaths` server failures is tried alone, and rejected when a server fails on it alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from datagen.errors import EndpointDown, Interrupted
from datagen.fanout.config import DispatchConfig
from datagen.fanout.histogram import Histogram
from datagen.fanout.queue import RowQueue
from datagen.fanout.rows import Answered, Rejected, Role, Row, Work
from datagen.fanout.server import Server, ServerSpec, choose_quarantine, given_up
from datagen.target.deadlines import Deadlines
from datagen.target.failures import CapacityFailure, EndpointFailure, RequestFailure, RowFailure

T = TypeVar("T")
TICK_S = 0.2
CAPACITY_PAUSE_S = 0.5


class Dispatcher:
    """Feeds every open partition's rows to the servers. An async context manager; one per process."""

    def __init__(
        self,
        servers: Sequence[ServerSpec],
        config: DispatchConfig | None = None,
        *,
        held: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`held`: no row is sent while it is true, looked at with each answer and every TICK_S."""
        self._held, self._sendable_since = held, clock()
        self._config = config = config or DispatchConfig()
        self._clock = clock
        self._servers = [Server(s, config.window, config.breaker, config.pace) for s in servers]
        self._queue = RowQueue(config.deaths)
        self._orders = itertools.count()
        self._flights: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._stopped: BaseException | None = None
        self._deadlines = Deadlines()
        self._quarantined = False
        self.queue_wait, self.loop_lag = Histogram(), Histogram()

    async def __aenter__(self) -> Dispatcher:
        self._spawn(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop(Interrupted("the run is closing"), drain_s=0)
        tasks = [*self._flights, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def capacity(self) -> int:
        """Rows that all servers together may hold."""
        return sum(s.window.size for s in self._servers)

    @property
    def in_flight(self) -> int:
        """Rows now at a server."""
        return len(self._flights)

    @property
    def queued(self) -> int:
        """Rows that wait for a free slot."""
        return len(self._queue)

    @property
    def hungry(self) -> bool:
        """True while fewer rows wait than half of what the servers hold: soon one could stand idle."""
        return 2 * self.queued < self.capacity

    def state(self) -> list[dict[str, Any]]:
        """One record per endpoint: see `Server.state`."""
        return [s.state() for s in self._servers]

    def latencies(self) -> dict[str, Histogram]:
        """Server time of answered rows, by endpoint."""
        return {s.url: s.latency for s in self._servers}

    async def run(self, work: Work[T]) -> Answered[T]:
        """Have some server answer `work`.

        Raises Rejected when the row cannot be collected, EndpointDown when no server has been
        alive for `patience_s`, Interrupted once the run is stopping.
        """
        if self._stopped is not None:
            raise self._stopped
        future: asyncio.Future[Answered[T]] = asyncio.get_running_loop().create_future()
        row = Row(work, next(self._orders), self._clock(), future)
        self._requeue(row)
        try:
            return await future
        except asyncio.CancelledError:
            future.cancel()  # a queued row is skipped when popped
            if row.flight is not None:
                row.flight.cancel()  # the client aborts the request on the server
            raise

    def stop(self, why: BaseException, *, drain_s: float) -> None:
        """Send nothing more: queued rows fail with `why`, and those at a server after `drain_s`."""
        self._stopped = self._stopped or why
        for row in self._queue.drain():
            _fail(row, self._stopped)
        for flight in self._flights:  # no other will begin
            asyncio.get_running_loop().call_later(drain_s, flight.cancel)

    # -- sending -------------------------------------------------------------------------------

    def _requeue(self, row: Row) -> None:
        if self._stopped is not None:
            _fail(row, self._stopped)
        else:
            self._queue.push(row)
            self._pump()

    def _pump(self) -> None:
        """Send rows while a server has room for one."""
        if self._held():
            return
        now = self._clock()
        if self._queue.has_suspects or self._quarantined:
            self._quarantined = choose_quarantine(self._servers, self._queue.next_suspect)
        while self._queue:
            open_servers = [s for s in self._servers if s.room(now)]
            if not self._send_suspect(open_servers) and not self._send_next(open_servers):
                break

    def _send_suspect(self, open_servers: list[Server]) -> bool:
        for server in open_servers:
            if server.quarantine:
                row = self._queue.pop_suspect(server.role)
                if row is not None:
                    self._send(row, server)
                    return True
        return False

    def _send_next(self, open_servers: list[Server]) -> bool:
        free = [s for s in open_servers if not s.quarantine]
        if not free:
            return False
        roles = Role(0)
        for server in free:
            roles |= server.role
        row = self._queue.pop(roles)
        if row is None:
            return False
        able = [s for s in free if s.role & row.work.role] if roles is not free[0].role else free
        self._send(row, min(able, key=lambda s: s.preference(row)) if len(able) > 1 else able[0])
        return True

    def _send(self, row: Row, server: Server) -> None:
        if not server.flights:
            server.watchdog.began(self._clock())
        server.window.admit()
        row.sent_at = self._clock()
        row.flight = asyncio.create_task(self._fly(row, server))
        self._flights.add(row.flight)
        server.flights[row.flight] = row

    async def _fly(self, row: Row, server: Server) -> None:
        sent_at = row.sent_at
        self.queue_wait.observe(sent_at - row.queued_at)
        limit_s = server.pace(row).deadline_s(row.work.tokens)
        try:
            try:
                with self._deadlines.within(limit_s) as deadline:
                    value = await row.work.call(server.endpoint)
            except TimeoutError as e:
                if not deadline.expired:
                    raise
                raise EndpointFailure("row_timeout", f"no answer in {limit_s:.0f} s") from e
        except asyncio.CancelledError:
            if row.future.done() or self._stopped is not None:
                if self._stopped is not None:
                    _fail(row, self._stopped)
                raise
            server.failures["given_up"] += 1  # the server stood still
            self._survived_a_death(row, server, server.breaker.last_failure)
        except RowFailure as e:
            self._moved(server)
            self._row_failed(row, server, e)
        except CapacityFailure as e:
            server.failures[e.reason] += 1
            server.window.pressed()
            server.refused(self._clock(), str(e), e.retry_after_s or CAPACITY_PAUSE_S)
            self._requeue(row)
        except EndpointFailure as e:
            self._endpoint_failed(row, server, e)
        except Exception as e:  # noqa: BLE001 - whatever it is belongs to the one who asked
            _fail(row, e)
        else:
            self._succeeded(row, server, sent_at, value)
        finally:
            server.window.release()
            if row.flight is not None:
                server.flights.pop(row.flight, None)
                self._flights.discard(row.flight)
            self._pump()

    # -- outcomes ------------------------------------------------------------------------------

    def _moved(self, server: Server) -> None:
        server.watchdog.moved(self._clock())
        server.refused_since = None
        server.breaker.answered()

    def _succeeded(self, row: Row, server: Server, sent_at: float, value: Any) -> None:
        now = self._clock()
        self._moved(server)
        server.window.succeeded()
        server.answered += 1
        server.latency.observe(now - sent_at)
        if row.work.size is not None:
            tokens = row.work.size(value)
            server.tokens += tokens
            server.pace(row).answered(tokens, now - sent_at)
        if not row.future.done():
            row.future.set_result(
                Answered(
                    value, server.url, row.attempts + 1, sent_at - row.queued_at, now - sent_at
                )
            )

    def _row_failed(self, row: Row, server: Server, e: RowFailure) -> None:
        server.failures[e.reason] += 1
        row.attempts += 1
        if e.permanent or row.attempts >= self._config.attempts:
            _fail(row, Rejected(e.reason, e.detail, row.attempts))
        else:
            row.avoid = server.url
            pause = 0.05 * 2**row.attempts
            asyncio.get_running_loop().call_later(pause, self._requeue, row)

    def _endpoint_failed(self, row: Row, server: Server, e: EndpointFailure) -> None:
        server.failures[e.reason] += 1
        gone = e.reason in ("unreachable", "connection_lost")
        server.failed(self._clock(), str(e), gone=gone)
        if e.in_flight:
            self._survived_a_death(row, server, str(e))
        else:
            row.avoid = server.url
            self._requeue(row)

    def _survived_a_death(self, row: Row, server: Server, why: str) -> None:
        """`row` was in flight when `server` failed; alone, after too many, it is the cause."""
        if self._queue.suspect(row):
            detail = f"in flight at {row.deaths} failures of a server, then alone: {why}"
            _fail(row, Rejected("killed_its_server", detail, row.deaths + 1))
            return
        row.deaths += 1
        row.avoid = server.url
        self._requeue(row)

    # -- watching ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _tick(self) -> None:
        while True:
            now = self._clock()
            for server in self._servers:
                if server.breaker.probe_due(now) and server.probing is None:
                    server.probing = self._spawn(self._probe(server))
                if now - server.polled_at >= self._config.poll_s and server.polling is None:
                    server.polling = self._spawn(self._poll(server))
                if server.watchdog.stalled(now, server.window.in_flight):
                    self._give_up(server, now)
            if self._held():
                self._sendable_since = now  # a server cannot show that it is back
            patience_s = self._config.patience_s
            lost = given_up(self._servers, self._queue.roles, now, patience_s)
            if lost and now - self._sendable_since > patience_s:
                self._despair(lost, now)
            self._pump()
            await asyncio.sleep(TICK_S)
            self.loop_lag.observe(max(0.0, self._clock() - now - TICK_S))

    def _give_up(self, server: Server, now: float) -> None:
        """A server that stands still loses its rows; the client aborts them there."""
        stood = f"no progress for {self._config.pace.stall_s:.0f} s"
        server.breaker.failed(now, stood, fatal=True)
        server.watchdog.began(now)
        for flight in list(server.flights):
            flight.cancel()

    def _despair(self, lost: list[Server], now: float) -> None:
        worst = max(lost, key=lambda s: s.out_for(now))
        waited_s = min(s.out_for(now) for s in lost)
        self.stop(
            EndpointDown(
                f"no server has answered for {waited_s:.0f} s; last: {worst.breaker.last_failure}",
                where=", ".join(s.url for s in lost),
                fix="start it again and repeat the command: nothing collected is lost",
            ),
            drain_s=0,
        )

    async def _probe(self, server: Server) -> None:
        try:
            healthy = await server.is_back()
        finally:
            server.probing = None
        server.breaker.probed(self._clock(), healthy=healthy)
        self._pump()

    async def _poll(self, server: Server) -> None:
        try:
            load = await server.endpoint.load()
        except (RequestFailure, TimeoutError) as e:
            load = None  # its rows will show what is wrong
            if isinstance(e, RequestFailure) and e.reason == "unreachable":  # unless it has none
                server.failed(self._clock(), str(e), gone=True)
        finally:
            server.polling, server.polled_at = None, self._clock()
        if load is not None:
            server.window.observe(load.running, load.queued, load.token_usage)
            server.watchdog.tokens(self._clock(), load.generated_tokens)
            self._pump()


def _fail(row: Row, error: BaseException) -> None:
    if not row.future.done():
        row.future.set_exception(error)
