"""Seconds, counted in buckets that double: small, mergeable, exact to a factor. Pure."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS = tuple(0.001 * 2**k for k in range(22))
"""Upper bounds in seconds, 1 ms to 35 min; the last bucket has none."""


class Histogram:
    """How often a duration fell where."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total_s = 0.0
        self.largest_s = 0.0

    @property
    def n(self) -> int:
        """Durations counted."""
        return sum(self.counts)

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total_s += seconds
        self.largest_s = max(self.largest_s, seconds)

    def quantile(self, q: float) -> float | None:
        """An upper bound, within a factor of two, of quantile `q`; None when nothing was counted."""
        n = self.n
        if not n:
            return None
        reached = next(i for i, seen in enumerate(accumulate(self.counts)) if seen >= q * n)
        return self.largest_s if reached == len(BOUNDS) else min(BOUNDS[reached], self.largest_s)
