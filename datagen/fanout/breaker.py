"""When to leave a server alone: a circuit breaker. Pure; time is passed in."""

from __future__ import annotations

from enum import Enum

from pydantic import Field

from datagen.strict import StrictModel


class BreakerConfig(StrictModel):
    """`failures` in a row open the breaker; a probe is due every `probe_every_s` while it is open."""

    failures: int = Field(default=3, ge=1)
    probe_every_s: float = Field(default=1.0, gt=0)


class State(Enum):
    """CLOSED: rows flow. OPEN: none do; /health is probed."""

    CLOSED = "closed"
    OPEN = "open"


class Breaker:
    """The health of one endpoint, as its answers show it."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.state = State.CLOSED
        self.opened_at: float | None = None
        self.last_failure = ""
        self._failures = 0
        self._next_probe = 0.0

    @property
    def closed(self) -> bool:
        """True when rows may be sent."""
        return self.state is State.CLOSED

    def answered(self) -> None:
        """The server answered a row, with whatever it said."""
        self._failures = 0

    def failed(self, now: float, reason: str, *, fatal: bool) -> None:
        """The server failed; `fatal` (connection refused or lost) opens the breaker at once."""
        self._failures += 1
        self.last_failure = reason
        if self.closed and (fatal or self._failures >= self._config.failures):
            self.state, self.opened_at, self._next_probe = State.OPEN, now, now

    def probe_due(self, now: float) -> bool:
        """True when an open breaker wants /health asked now."""
        return not self.closed and now >= self._next_probe

    def probed(self, now: float, *, healthy: bool) -> None:
        """The probe's answer; a healthy server gets rows again."""
        if healthy:
            self.state, self.opened_at, self._failures = State.CLOSED, None, 0
        else:
            self._next_probe = now + self._config.probe_every_s

    def open_for(self, now: float) -> float:
        """Seconds since the breaker opened; 0 when it is closed."""
        return 0.0 if self.opened_at is None else now - self.opened_at
