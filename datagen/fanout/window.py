"""How many requests one server may hold: additive increase, multiplicative decrease. No clock, no I/O."""

from __future__ import annotations

from pydantic import Field

from datagen.strict import StrictModel


class WindowConfig(StrictModel):
    """Bounds of the window; `initial` is cut to what the server says it can run at once."""

    initial: int = Field(default=32, ge=1)
    maximum: int = Field(default=1024, ge=1)
    minimum: int = Field(default=1, ge=1)
    growth_after: int = Field(default=25, ge=1)
    """Answers in a row, at a full window, before it grows by one."""
    shrink: float = Field(default=0.75, gt=0, lt=1)


class Window:
    """The admission limit of one endpoint."""

    def __init__(self, config: WindowConfig, *, server_limit: int | None = None) -> None:
        self._config = config
        self._maximum = min(config.maximum, server_limit or config.maximum)
        self.size = max(config.minimum, min(config.initial, self._maximum))
        self.in_flight = 0
        self._streak = 0

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

    def release(self) -> None:
        """A request came back, whatever its outcome."""
        self.in_flight -= 1

    def succeeded(self) -> None:
        """An answer arrived; a window that was full long enough grows by one."""
        self._streak = self._streak + 1 if self.in_flight >= self.size - 1 else 0
        if self._streak >= self._config.growth_after and self.size < self._maximum:
            self.size, self._streak = self.size + 1, 0

    def pressed(self) -> None:
        """The server said it is full; the window shrinks, never below what keeps it working."""
        self.size = max(
            self._config.minimum, int(min(self.size, self.in_flight + 1) * self._config.shrink)
        )
        self._streak = 0
