"""accept_len against training samples: a saturating fit, its uncertainty, and the samples a goal takes.

    a(n) = ceiling - drop * n^-rate,       drop >= 0, rate in RATES, ceiling <= K + 1 where K is known

Intervals are profile likelihoods: a value belongs to the 95 % interval when some curve through it fits
the points nearly as well as the best curve. Nothing is linearised, so a ceiling that the points do not
pin down gives an open interval, not a narrow wrong one. Three unknowns need three sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datagen.acceptance.metrics import student_t
from datagen.errors import ConfigError

RATES = np.geomspace(0.01, 3.0, 400)  # by ratio: for small rates the ceiling goes as 1 / rate
CHI2_95 = 3.841458820694124  # 95 % point of chi square with one degree of freedom
MOST_SAMPLES = 10**9
UNKNOWNS = 3
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """accept_len of a drafter trained on `samples`; `sd` its standard error, None if unknown."""

    samples: int
    accept_len: float
    sd: float | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A best value and its 95 % interval; an end that the points leave open is None."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Goal:
    """Samples for an accept_len. `reachable` None: the points do not tell."""

    accept_len: float
    samples: Range
    reachable: bool | None
    answer: str


class NotIdentifiable(ConfigError):
    """The points cannot tell a saturating curve."""


class ScalingFit:
    """A fitted curve. Raises NotIdentifiable with fewer than three sizes, ConfigError for bad points."""

    def __init__(self, points: Sequence[Point], *, steps: int | None = None) -> None:
        if any(p.samples < 1 or not math.isfinite(p.accept_len) for p in points):
            raise ConfigError(
                "a scaling point needs a positive sample count and a finite accept_len"
            )
        if any(p.sd is not None and not p.sd > 0 for p in points):
            raise ConfigError("the standard error of a scaling point must be positive")
        sizes = {p.samples for p in points}
        if len(sizes) < UNKNOWNS:
            raise NotIdentifiable(
                f"not identifiable: {len(sizes)} training sizes cannot tell a saturating curve, which "
                f"has {UNKNOWNS} unknowns",
                fix="train on nested subsets of at least three sizes, e.g. 10K, 20K, 37K, 83K",
            )
        self.points = tuple(sorted(points, key=lambda p: p.samples))
        self.most = math.inf if steps is None else steps + 1.0
        self._scale = float(max(sizes))  # n is counted in these, so that n^-rate stays near 1
        self._n: Floats = np.array([p.samples for p in self.points]) / self._scale
        self._y: Floats = np.array([p.accept_len for p in self.points])
        self._known = all(p.sd is not None for p in self.points)
        sds = [p.sd or 1.0 for p in self.points] if self._known else [1.0] * len(points)
        self._w: Floats = 1 / np.square(sds)
        self._best, self._margin = self._fit()

    # -- answers -------------------------------------------------------------------------------

    @property
    def ceiling(self) -> Range:
        """accept_len with endless data."""
        return self._interval(math.inf)

    def forecast(self, samples: float) -> Range:
        """accept_len after training on `samples`."""
        return self._interval(samples)

    def predict(self, samples: float) -> float:
        """The best curve at `samples`."""
        ceiling, drop, rate = self._best
        return ceiling - drop * float((samples / self._scale) ** -rate)

    def goal(self, accept_len: float) -> Goal:
        """How many samples `accept_len` takes, or that data alone does not reach it."""
        if accept_len > self.most:
            text = f"not reachable: {self.most - 1:.0f} draft steps give at most {self.most:g}"
            return Goal(accept_len, Range(None, None, None), False, text)
        sizes = np.geomspace(self.points[0].samples / 100, MOST_SAMPLES, 700)
        inside = np.array([self._profile(accept_len, n) for n in sizes]) <= self._margin
        endless = self._profile(accept_len, math.inf, at_least=True) <= self._margin
        above = np.array([self.predict(n) for n in sizes]) >= accept_len
        value = float(sizes[int(above.argmax())]) if above.any() else None
        if not inside.any():
            if value is None:
                text = (
                    f"not reachable by data alone: the curve saturates at {self.ceiling.value:.2f}"
                )
                return Goal(accept_len, Range(None, None, None), False, text)
            return Goal(accept_len, Range(value, value, value), True, f"about {value:,.0f} samples")
        low = float(sizes[int(inside.argmax())])
        last = int(len(inside) - 1 - inside[::-1].argmax())
        closed = last < len(sizes) - 1 and self._ceiling_above(accept_len)
        found = Range(value, low, float(sizes[last]) if closed else None)
        if value is None:
            text = (
                f"probably not reachable by data alone: the best curve saturates at "
                f"{self.ceiling.value:.2f}; at the optimistic end {low:,.0f} samples"
            )
            return Goal(accept_len, found, None if endless else False, text)
        most = f"to {found.high:,.0f}" if found.high else "upwards, without a bound"
        text = f"about {value:,.0f} samples (95 %: {low:,.0f} {most})"
        return Goal(accept_len, found, True if found.high else None, text)

    # -- the profile ---------------------------------------------------------------------------

    def _fit(self) -> tuple[tuple[float, float, float], float]:
        """The best (ceiling, drop, rate), and the misfit up to which a curve is in the interval."""
        misfits, ceilings, drops = self._linear()
        i = int(misfits.argmin())
        least = float(misfits[i])
        freedom = len(self.points) - UNKNOWNS
        if self._known:
            margin = least + CHI2_95
        elif freedom:
            margin = least + least / freedom * student_t(0.975, freedom) ** 2
        else:
            margin = math.inf  # three points, no error bars: nothing bounds the curve
        return (float(ceilings[i]), float(drops[i]), float(RATES[i])), margin

    def _linear(self) -> tuple[Floats, Floats, Floats]:
        """Per rate: misfit, ceiling, drop of the weighted least squares with drop >= 0."""
        x = self._n[None, :] ** -RATES[:, None]
        w = self._w / self._w.sum()
        mean_x, mean_y = x @ w, float(self._y @ w)
        dx, dy = x - mean_x[:, None], self._y - mean_y
        drops = np.maximum(-(dx @ (w * dy)) / (np.square(dx) @ w), 0.0)
        ceilings = mean_y + drops * mean_x
        over = ceilings > self.most
        pinned = self._drop_through(np.full(len(RATES), self.most), np.zeros_like(x), x)
        drops, ceilings = np.where(over, pinned, drops), np.minimum(ceilings, self.most)
        return self._misfit(ceilings[:, None] - drops[:, None] * x), ceilings, drops

    def _drop_through(self, value: Floats, at: Floats | float, x: Floats) -> Floats:
        """Per rate the drop >= 0 of the best curve through `value` where n^-rate is `at`."""
        u = np.broadcast_to(at, x.shape) - x
        square = np.square(u) @ self._w
        raw = ((self._y - value[:, None]) * u) @ self._w / np.where(square > 0, square, 1.0)
        return np.maximum(np.where(square > 0, raw, 0.0), 0.0)

    def _misfit(self, curve: Floats) -> Floats:
        return np.asarray(np.square(self._y - curve) @ self._w)

    def _profile(self, value: float, samples: float, *, at_least: bool = False) -> float:
        """Least misfit of a curve through (`samples`, `value`), ceilings above the most left out."""
        if at_least and self.predict(MOST_SAMPLES) >= value:
            return -math.inf
        at = (
            np.zeros(len(RATES))
            if math.isinf(samples)
            else (samples / self._scale) ** -RATES
        )[:, None]  # fmt: skip
        x = self._n[None, :] ** -RATES[:, None]
        drops = self._drop_through(np.full(len(RATES), value), at, x)
        if math.isfinite(self.most):
            room = (self.most - value) / np.where(at[:, 0] > 0, at[:, 0], np.inf)
            drops = np.where(at[:, 0] > 0, np.minimum(drops, room), drops)
        return float(self._misfit(value + drops[:, None] * (at - x)).min())

    def _ceiling_above(self, value: float) -> bool:
        """True when no curve in the interval stays below `value` for ever."""
        low = self.ceiling.low
        return low is not None and low > value

    def _interval(self, samples: float) -> Range:
        best = self._best[0] if math.isinf(samples) else self.predict(samples)
        if math.isinf(self._margin):
            return Range(best, None, None)
        return Range(
            best,
            self._edge(lambda v: self._profile(v, samples), best, -1.0),
            self._edge(lambda v: self._profile(v, samples), best, +1.0),
        )

    def _edge(self, misfit: Callable[[float], float], best: float, side: float) -> float | None:
        """Where the misfit passes the margin, from `best` outwards; None when it never does."""
        limit = 1.0 if side < 0 else self.most  # accept_len is at least 1
        step, inside = 1e-3, best
        while misfit(inside + side * step) <= self._margin:
            inside += side * step
            step *= 2
            if side * (inside - limit) >= 0:
                return limit if math.isfinite(limit) else None
            if step > 1e3:
                return None
        outside = inside + side * step
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (
                (middle, outside) if misfit(middle) <= self._margin else (inside, middle)
            )
        return inside
