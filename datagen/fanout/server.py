"""One server as the dispatcher sees it: what it may be sent now, and how it has done."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datagen.errors import DatagenError
from datagen.fanout.breaker import Breaker, BreakerConfig, State
from datagen.fanout.endpoint import Endpoint
from datagen.fanout.histogram import Histogram
from datagen.fanout.pace import Pace, PaceConfig, Watchdog
from datagen.fanout.rows import Role, Row
from datagen.fanout.window import Window, WindowConfig
from datagen.target.failures import RequestFailure

LONGEST_PAUSE_S = 60.0
"""However long a server asks to be left alone."""
TAKEN_S = 10.0
"""A row that has not been refused for so long was taken."""
LOAD_STEPS = 8
"""Loads that differ by less than one in this many count as equal, and the sticky endpoint is taken."""


Proof = Callable[[], Awaitable[None]]
"""Raises DatagenError when a server is not what preflight has proven."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """An endpoint, what it serves, and the most it may hold (see `window_limit`)."""

    endpoint: Endpoint
    role: Role = Role.BOTH
    limit: int | None = None
    proof: Proof | None = None
    """Asked of a server that comes back after a failure: another one may answer at its address."""


class Server:
    """Window, breaker, pace and rows in flight of one endpoint."""

    def __init__(
        self, spec: ServerSpec, window: WindowConfig, breaker: BreakerConfig, pace: PaceConfig
    ) -> None:
        self.endpoint, self.role, self._proof = spec.endpoint, spec.role, spec.proof
        self.window = Window(window, limit=spec.limit)
        self.breaker = Breaker(breaker)
        self.paces = {role: Pace(pace) for role in (Role.GENERATE, Role.CAPTURE)}
        self.watchdog = Watchdog(pace)
        self.flights: dict[asyncio.Task[None], Row] = {}
        self.paused_until = 0.0
        self.quarantine = False
        """True while only suspects of killing a server are sent here, one at a time."""
        self.probing: asyncio.Task[None] | None = None
        self.polling: asyncio.Task[None] | None = None
        self.polled_at = float("-inf")
        self.refused_since: float | None = None
        """When it first said that it is full, of the times since it last answered."""
        self.answered = self.tokens = 0
        self.failures: Counter[str] = Counter()
        self.latency = Histogram()

    @property
    def url(self) -> str:
        """The endpoint's address."""
        return self.endpoint.url

    def room(self, now: float) -> bool:
        """True when it may be sent a row."""
        if now < self.paused_until or self.breaker.state is State.OPEN:
            return False
        if self.breaker.state is State.TRIAL or self.quarantine:
            return not self.window.in_flight
        return self.window.free > 0

    def refused(self, now: float, why: str, wait_s: float) -> None:
        """It is full: nothing is sent for `wait_s`."""
        if self.refused_since is None:
            self.refused_since = now
        self.breaker.last_failure = why
        self.paused_until = now + min(wait_s, LONGEST_PAUSE_S)

    def failed(self, now: float, why: str, *, gone: bool) -> None:
        """It failed; `gone`: its process seems to be, and the next one's window is a new server's."""
        if gone and self.breaker.closed:
            self.window.reset()
        self.breaker.failed(now, why, fatal=gone, gone=gone)

    def out_for(self, now: float) -> float:
        """Seconds for which it has done no work: its breaker is open, or it is full without end."""
        full_for = 0.0 if self.refused_since is None else now - self.refused_since
        if full_for and any(now - row.sent_at > TAKEN_S for row in self.flights.values()):
            full_for = 0.0  # it works at what it took
        return max(self.breaker.open_for(now), full_for)

    async def is_back(self) -> bool:
        """Whether it answers, and is still the server that preflight has proven."""
        try:
            if not await self.endpoint.healthy():
                return False
            if self._proof is not None:
                await self._proof()
        except (TimeoutError, RequestFailure):
            return False
        except DatagenError as e:
            self.breaker.last_failure = str(e)
            return False
        return True

    def preference(self, row: Row) -> tuple[bool, int, bool, float]:
        """Smaller is better for `row`: not where it failed, less loaded, where its last turn was."""
        return (
            self.url == row.avoid,
            int(self.window.load * LOAD_STEPS),
            self.url != row.work.sticky,
            self.window.load,
        )

    def pace(self, row: Row) -> Pace:
        """The pace of this kind of row here."""
        return self.paces[row.work.role]

    def state(self) -> dict[str, Any]:
        """For views: url, state, window, running, answered, failures by reason, latencies in s."""
        return {
            "url": self.url,
            "state": self.breaker.state.value,
            "window": self.window.size,
            "running": self.window.in_flight,
            "answered": self.answered,
            "tokens": self.tokens,
            "failures": dict(self.failures),
            "latency_p50_s": self.latency.quantile(0.5),
            "latency_p99_s": self.latency.quantile(0.99),
        }


def given_up(
    servers: Sequence[Server], wanted: Role, now: float, patience_s: float
) -> list[Server]:
    """The servers of a role that rows want, when none of them has worked for `patience_s`; else none.

    `wanted`: by the rows that wait; those at a server count too.
    """
    out = {s.url for s in servers if s.out_for(now) > patience_s}
    if not out:  # as nearly always: rows in flight are many, and this is asked often
        return []
    for server in servers:
        for row in server.flights.values():
            wanted |= row.work.role
    for kind in (Role.GENERATE, Role.CAPTURE):
        able = [s for s in servers if s.role & kind]
        if kind & wanted and able and all(s.url in out for s in able):
            return able
    return []


def choose_quarantine(servers: Sequence[Server], suspect: Row | None) -> bool:
    """Have one server take nothing but suspects while there are any, so that each is tried alone.

    Returns whether one does.
    """
    held = next((s for s in servers if s.quarantine), None)
    if suspect is None:
        if held is not None and not held.flights:
            held.quarantine = False
        return any(s.quarantine for s in servers)
    if held is not None and held.breaker.closed and held.role & suspect.work.role:
        return True
    able = [s for s in servers if s.breaker.closed and s.role & suspect.work.role]
    if able:
        if held is not None:
            held.quarantine = False
        min(able, key=lambda s: s.window.in_flight).quarantine = True
    return True
