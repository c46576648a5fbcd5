"""How fast a server answers, how long a row may take there, and when it stands still. Pure."""

from __future__ import annotations

from collections import deque

from pydantic import Field

from datagen.strict import StrictModel

MEMORY = 128
ENOUGH = 16


class PaceConfig(StrictModel):
    """Seconds. A row's deadline is measured, and never above `row_timeout_s`."""

    row_timeout_s: float = Field(default=1800.0, gt=0)
    base_s: float = Field(default=30.0, gt=0)
    """Granted to every row, whatever its length: queueing on the server, prefill."""
    factor: float = Field(default=3.0, ge=1)
    """Times the slowest rate seen that a row may need."""
    stall_s: float = Field(default=60.0, gt=0)
    """Without a token or an answer for so long, a server that has rows stands still."""


class Pace:
    """Tokens a second of single requests, as this server answers them of late."""

    def __init__(self, config: PaceConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._slowest: float | None = None

    def answered(self, tokens: int, seconds: float) -> None:
        """A row of `tokens` took `seconds`."""
        if tokens > 0 and seconds > 0:
            self._recent.append(tokens / seconds)
            self._slowest = None

    def deadline_s(self, tokens: int) -> float:
        """What a row of up to `tokens` may take; the fixed limit until enough has been seen."""
        if len(self._recent) < ENOUGH or not tokens:
            return self._config.row_timeout_s
        if self._slowest is None:
            self._slowest = sorted(self._recent)[len(self._recent) // 20]
        expected = self._config.base_s + self._config.factor * tokens / self._slowest
        return min(expected, self._config.row_timeout_s)


class Watchdog:
    """Liveness by progress: `/health` answers on servers that hang."""

    def __init__(self, config: PaceConfig) -> None:
        self._stall_s = config.stall_s
        self._moved_at: float | None = None
        self._tokens: float | None = None

    def began(self, now: float) -> None:
        """The first row reached an idle server."""
        self._moved_at = now

    def moved(self, now: float) -> None:
        """The server answered something."""
        self._moved_at = now

    def tokens(self, now: float, count: float | None) -> None:
        """The server's counter of generated tokens, if it shows one."""
        if count is not None and count != self._tokens:
            self._tokens, self._moved_at = count, now

    def stalled(self, now: float, in_flight: int) -> bool:
        """True when the server has rows and has not moved for `stall_s`.

        A server that shows no counter can be told from one at work on a long answer only by time:
        its rows' own deadlines judge it, not this.
        """
        if not in_flight or self._moved_at is None or self._tokens is None:
            return False
        return now - self._moved_at > self._stall_s
