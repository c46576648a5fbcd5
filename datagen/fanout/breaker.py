"""When to leave a server alone: a circuit breaker. Pure; time is passed in."""

from __future__ import annotations

from enum import Enum

from pydantic import Field

from datagen.strict import StrictModel


class BreakerConfig(StrictModel):
    """`failures` in a row open the breaker; a probe is due every `probe_every_s` while it is open."""

    failures: int = Field(default=3, ge=1)
    probe_every_s: float = Field(default=1.0, gt=0)
    max_probe_every_s: float = Field(default=30.0, gt=0)
    """The pause doubles up to this with each trial row that fails."""


class State(Enum):
    """CLOSED: rows flow. OPEN: none do; /health is probed. TRIAL: one row at a time, to prove it."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Breaker:
    """The health of one endpoint, as its answers show it.

    A server that was gone and answers /health is a new one: rows flow. One that failed or stood still
    while its /health was fine has proven nothing by it: one row must come back first.
    """

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.state = State.CLOSED
        self.opened_at: float | None = None
        self.last_failure = ""
        self._failures = 0
        self._gone = False
        self._pause = config.probe_every_s
        self._next_probe = 0.0

    @property
    def closed(self) -> bool:
        """True when rows may be sent freely."""
        return self.state is State.CLOSED

    def answered(self) -> None:
        """The server answered a row, with whatever it said."""
        self._failures = 0
        if self.state is State.TRIAL:
            self._close()

    def failed(self, now: float, reason: str, *, fatal: bool, gone: bool = False) -> None:
        """The server failed; `fatal` opens the breaker at once; `gone`: its process may be new next."""
        self._failures += 1
        self.last_failure = reason
        if self.state is State.TRIAL:
            self._pause = min(self._pause * 2, self._config.max_probe_every_s)
            self.state, self._gone, self._next_probe = State.OPEN, gone, now + self._pause
        elif self.closed and (fatal or self._failures >= self._config.failures):
            self.state, self._gone = State.OPEN, gone
            self.opened_at, self._next_probe = now, now
        elif gone:
            self._gone = True

    def probe_due(self, now: float) -> bool:
        """True when an open breaker wants /health asked now."""
        return self.state is State.OPEN and now >= self._next_probe

    def probed(self, now: float, *, healthy: bool) -> None:
        """The probe's answer."""
        if not healthy:
            self._gone = True
            self._next_probe = now + self._config.probe_every_s
        elif self._gone:
            self._close()
        else:
            self.state = State.TRIAL

    def open_for(self, now: float) -> float:
        """Seconds since the server last was as it should be; 0 when rows flow."""
        return 0.0 if self.opened_at is None else now - self.opened_at

    def _close(self) -> None:
        self.state, self.opened_at, self._failures = State.CLOSED, None, 0
        self._pause, self._gone = self._config.probe_every_s, False
