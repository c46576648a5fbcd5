"""How many requests one server may hold. No clock, no I/O.

Where the server shows its queue, the window follows it as TCP Vegas does: a short queue means the
server is full and no more; a long one means that rows wait there which another server could take.
Without metrics: additive increase, multiplicative decrease on 429 and 503.
"""

from __future__ import annotations

from pydantic import Field

from datagen.strict import StrictModel

FULL_MEMORY = 0.97
"""Share of the KV cache in use above which the server begins to take requests back."""
STEADY_POLLS = 3
"""Polls in a row, without more running than before, that make a queue a sign of too large a window."""
OVERFEED = 1.25
"""Most of a server's own limit that is worth sending: what waits there starts without a round trip."""


class WindowConfig(StrictModel):
    """Bounds of the window; `initial` is cut to what the server says it can run at once."""

    initial: int = Field(default=32, ge=1)
    maximum: int = Field(default=1024, ge=1)
    minimum: int = Field(default=1, ge=1)
    growth_after: int = Field(default=25, ge=1)
    """Answers in a row, at a full window, before it grows by one (a server without metrics)."""
    shrink: float = Field(default=0.75, gt=0, lt=1)
    beyond_graph: bool = False
    """Let a batch grow beyond the server's CUDA graphs, where a step costs several times as much."""


def window_limit(
    config: WindowConfig, *, max_running: int | None = None, graph_batch: int | None = None
) -> int:
    """The most a window may reach at a server that says this of itself."""
    limit = config.maximum
    if max_running:
        limit = min(limit, int(max_running * OVERFEED))
    if graph_batch and not config.beyond_graph:
        limit = min(limit, graph_batch)
    return max(limit, config.minimum)


class Window:
    """The admission limit of one endpoint."""

    def __init__(self, config: WindowConfig, *, limit: int | None = None) -> None:
        self._config = config
        self.limit = limit or config.maximum
        self.in_flight = 0
        self.reset()

    def reset(self) -> None:
        """Begin anew, for a server that has been away; what is in flight stays counted."""
        self.size = max(self._config.minimum, min(self._config.initial, self.limit))
        self._streak = 0
        self._metered = self._was_full = False
        self._doubling = True
        self._peak = self._steady = 0

    @property
    def free(self) -> int:
        """Requests that may be sent now."""
        return max(0, self.size - self.in_flight)

    @property
    def load(self) -> float:
        """Share of the window in use; the least loaded endpoint gets the next row."""
        return self.in_flight / self.size

    def admit(self) -> None:
        """A request is sent."""
        self.in_flight += 1
        self._was_full = self._was_full or self.in_flight >= self.size

    def release(self) -> None:
        """A request came back, whatever its outcome."""
        self.in_flight -= 1

    def observe(self, running: int, queued: int, token_usage: float | None = None) -> None:
        """The server's own figures: requests it runs, requests it has waiting, KV cache in use."""
        self._metered = True
        tolerated = max(2, running // 10)
        if token_usage is not None and token_usage > FULL_MEMORY:
            self._resize(int(self.size * self._config.shrink))
        elif queued > tolerated:
            # while prompts are being read, they queue and what runs still grows: no overload
            self._steady = self._steady + 1 if running and running <= self._peak else 0
            if self._steady >= STEADY_POLLS:
                excess = min(queued - tolerated // 2, max(1, self.size // 8))
                self._resize(min(self.limit, max(self._peak, self.size - excess)))
        elif queued <= 1 and self._was_full:
            grown = self.size * 2 if self._doubling else self.size + max(1, self.size // 8)
            self.size = min(self.limit, grown)
        self._peak = max(self._peak, running)
        self._was_full = self.in_flight >= self.size

    def succeeded(self) -> None:
        """An answer arrived; without metrics, a window that was full long enough grows by one."""
        if self._metered:
            return
        self._streak = self._streak + 1 if self.in_flight >= self.size - 1 else 0
        if self._streak >= self._config.growth_after and self.size < self.limit:
            self.size, self._streak = self.size + 1, 0

    def pressed(self) -> None:
        """The server said it is full; the window shrinks, never below what keeps it working."""
        self._resize(int(min(self.size, self.in_flight + 1) * self._config.shrink))
        self._streak = 0

    def _resize(self, size: int) -> None:
        self.size, self._doubling = max(self._config.minimum, size), False
