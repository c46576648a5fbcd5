"""The scaling fit: it covers planted truths, and says when the points cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from datagen.acceptance.scaling import NotIdentifiable, Point, ScalingFit
from datagen.errors import ConfigError

SIZES = (10_000, 20_000, 37_000, 83_000)
TRUTHS = [(2.6, 20.0, 0.35), (3.4, 8.0, 0.2), (2.2, 300.0, 0.7)]
SD = 0.02


def curve(truth: tuple[float, float, float], n: float) -> float:
    ceiling, drop, rate = truth
    return float(ceiling - drop * n**-rate)


def planted(
    truth: tuple[float, float, float], generator: np.random.Generator | None = None
) -> list[Point]:
    noise = generator.normal(0, SD, len(SIZES)) if generator else np.zeros(len(SIZES))
    return [Point(n, curve(truth, n) + float(e), SD) for n, e in zip(SIZES, noise, strict=True)]


def coverage(truth: tuple[float, float, float], trials: int) -> float:
    generator, inside = np.random.default_rng(7), 0
    for _ in range(trials):
        found = ScalingFit(planted(truth, generator)).forecast(300_000)
        low = -np.inf if found.low is None else found.low
        high = np.inf if found.high is None else found.high
        inside += low <= curve(truth, 300_000) <= high
    return inside / trials


def test_the_forecast_covers_a_planted_truth_in_short() -> None:
    assert coverage(TRUTHS[0], 40) >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("truth", TRUTHS)
def test_the_forecast_covers_the_planted_truth_in_90_of_100_of_300_trials(
    truth: tuple[float, float, float],
) -> None:
    assert coverage(truth, 300) >= 0.90


def test_the_interval_is_not_the_whole_line() -> None:
    found = ScalingFit(planted(TRUTHS[0])).forecast(166_000)
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low < 0.25


def test_two_sizes_are_not_identifiable() -> None:
    with pytest.raises(NotIdentifiable, match="not identifiable: 2 training sizes"):
        ScalingFit([Point(10_000, 2.0, SD), Point(37_000, 2.1, SD), Point(37_000, 2.12, SD)])


def test_three_sizes_without_error_bars_bound_nothing() -> None:
    fit = ScalingFit([Point(n, curve(TRUTHS[0], n)) for n in SIZES[:3]])
    assert (fit.forecast(83_000).low, fit.forecast(83_000).high) == (None, None)


def test_without_error_bars_the_scatter_gives_them() -> None:
    errors = (0.01, -0.01, 0.01, 0.0, -0.01)
    points = [
        Point(n, curve(TRUTHS[0], n) + e) for n, e in zip((*SIZES, 160_000), errors, strict=True)
    ]
    found = ScalingFit(points).forecast(83_000)
    assert found.low is not None
    assert found.low < curve(TRUTHS[0], 83_000)


def test_exact_points_give_the_curve_back() -> None:
    fit = ScalingFit(planted(TRUTHS[0]))
    assert fit.predict(300_000) == pytest.approx(curve(TRUTHS[0], 300_000), abs=0.005)
    assert fit.ceiling.value == pytest.approx(2.6, abs=0.03)


def test_samples_for_a_goal_within_the_points_are_bounded() -> None:
    goal = ScalingFit(planted(TRUTHS[0])).goal(2.0)
    exact = (20.0 / 0.6) ** (1 / 0.35)
    assert goal.reachable
    assert goal.samples.value == pytest.approx(exact, rel=0.05)
    assert goal.samples.low is not None
    assert goal.samples.high is not None
    assert goal.samples.low < exact < goal.samples.high


def test_a_goal_above_the_ceiling_is_not_reachable_by_data_alone() -> None:
    flat = [Point(n, 2.05, 0.005) for n in SIZES]
    goal = ScalingFit(flat).goal(2.46)
    assert goal.reachable is not True
    assert "not reachable by data alone" in goal.answer


def test_a_goal_above_the_chains_length_is_not_reachable() -> None:
    goal = ScalingFit(planted(TRUTHS[0]), steps=2).goal(3.5)
    assert goal.reachable is False
    assert "2 draft steps give at most 3" in goal.answer


def test_the_chains_length_bounds_the_ceiling() -> None:
    rising = [Point(n, 1.9 + 0.3 * np.log10(n / 1e4), SD) for n in SIZES]
    high = ScalingFit(rising, steps=2).ceiling.high
    assert high is not None
    assert high <= 3


@pytest.mark.parametrize("point", [Point(0, 2.0), Point(5, float("nan")), Point(5, 2.0, 0.0)])
def test_points_that_make_no_sense_are_refused(point: Point) -> None:
    with pytest.raises(ConfigError):
        ScalingFit([*planted(TRUTHS[0]), point])
