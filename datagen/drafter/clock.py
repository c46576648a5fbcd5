"""How fast a run is: rows and tokens per second, and the share of the time that waits for data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from datagen.drafter.loader import Loader
from datagen.drafter.packing import Step


class Clock:
    """Counts since it was last read; measuring and saving are not training time."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._reset()

    def count(self, step: Step) -> None:
        """A finished step."""
        self._rows += step.rows[0]
        self._tokens += step.tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within is not counted."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def speed(self) -> dict[str, float]:
        """Since the last reading."""
        elapsed = max(1e-9, time.perf_counter() - self._started)
        found = {
            "rows_per_s": self._rows / elapsed,
            "tokens_per_s": self._tokens / elapsed,
            "wait_share": (self._loader.waited_s - self._waited) / elapsed,
        }
        self._reset()
        return found

    def _reset(self) -> None:
        self._rows = self._tokens = 0
        self._started = time.perf_counter()
        self._waited = self._loader.waited_s
