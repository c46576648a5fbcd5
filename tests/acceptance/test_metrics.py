"""accept_len, its intervals and comparisons, against drafters whose acceptance is known."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.acceptance.breakeven import chain_accept_len
from datagen.acceptance.metrics import (
    Counts,
    accept_len,
    compare,
    conditional_acceptance,
    distinct_n,
    length_tag,
    looping_share,
    predicted_accept_len,
    slices,
    student_t,
)
from datagen.errors import MeasurementError

STEPS = 2


def row(prompt: str, tokens: int, steps: int, **more: object) -> Counts:
    return Counts(f"{prompt}-0", prompt, tokens, steps, **more)  # type: ignore[arg-type]


def test_accept_len_is_a_ratio_of_sums_never_a_mean_of_ratios() -> None:
    found = accept_len([row("a", 30, 10), row("b", 2, 2)])
    assert found.value == 32 / 12
    assert found.value != (30 / 10 + 2 / 2) / 2


def test_a_sample_without_a_step_adds_nothing() -> None:
    with_it = accept_len([row("a", 30, 10), row("b", 5, 4), row("c", 0, 0)])
    assert with_it == accept_len([row("a", 30, 10), row("b", 5, 4)])


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(MeasurementError, match="none of 1 prompts ran a verify step"):
        accept_len([row("a", 0, 0)])


def test_one_prompt_has_a_value_and_no_interval() -> None:
    found = accept_len([row("a", 30, 10)])
    assert (found.value, found.low, found.high) == (3.0, None, None)
    assert "no interval" in str(found)


def test_samples_of_one_prompt_are_resampled_together() -> None:
    """Twenty turns of each of ten prompts say no more about prompts than ten prompts do."""
    alone = [row(f"p{i}", 10 + i, 8) for i in range(10)]
    turns = [Counts(f"p{i}-{t}", f"p{i}", 10 + i, 8) for i in range(10) for t in range(20)]
    assert accept_len(turns) == accept_len(alone)


def test_steps_cut_by_the_end_are_censored() -> None:
    counts = [row("a", 9, 4, eligible=(4, 3), accepted=(3, 2)), row("b", 0, 0)]
    assert conditional_acceptance(counts) == [3 / 4, 2 / 3]
    assert predicted_accept_len([0.5, 0.5]) == 1 + 0.5 + 0.25


def test_a_depth_that_no_step_reached_has_no_acceptance() -> None:
    assert conditional_acceptance([row("a", 2, 2, eligible=(2, 0), accepted=(0, 0))]) == [0.0, None]


def test_slices_part_the_samples_by_every_tag() -> None:
    rows = [
        row("a", 30, 10, tags={"source": "code", "language": "en"}),
        row("b", 10, 10, tags={"source": "chat", "language": "en"}),
        row("c", 0, 0, tags={"source": "empty"}),
    ]
    found = slices(rows)
    assert {k: v.value for k, v in found["source"].items()} == {"code": 3.0, "chat": 1.0}
    assert found["language"]["en"].value == 2.0


@given(st.lists(st.integers(0, 3), max_size=40))
def test_distinct_n_lies_in_0_to_1_and_finds_loops(ids: list[int]) -> None:
    assert 0 < distinct_n(ids) <= 1
    assert distinct_n([1, 2] * 40) < 0.1
    assert looping_share([row("a", 1, 1, distinct=0.1), row("b", 1, 1)]) == 0.5


def test_length_classes_sort_by_their_names() -> None:
    tags = [length_tag(n) for n in (1, 15, 16, 64, 300, 2000, 9000)]
    assert tags == sorted(tags)
    assert tags[1:4] == ["0000-0015", "0016-0063", "0064-0255"]


def test_students_t_is_the_tables() -> None:
    for freedom, value in ((1, 12.7062), (2, 4.3027), (9, 2.2622), (30, 2.0423), (400, 1.9659)):
        assert student_t(0.975, freedom) == pytest.approx(value, abs=1e-4)


# -- coverage ------------------------------------------------------------------------------------


def drawn_prompts(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance and number of steps of n prompts: hard ones need more steps, so the ratio is biased."""
    p = generator.beta(4, 3, n)
    return p, np.round(15 + 60 * (1 - p)).astype(int)


def measured(generator: np.random.Generator, n: int) -> list[Counts]:
    counts = []
    for i, (p, steps) in enumerate(zip(*drawn_prompts(generator, n), strict=True)):
        hits = generator.random((steps, STEPS)) < p
        tokens = steps + int(np.cumprod(hits, axis=1).sum())
        counts.append(row(f"{i:04d}", tokens, int(steps)))
    return counts


def coverage(trials: int, prompts: int) -> float:
    generator = np.random.default_rng(11)
    p, steps = drawn_prompts(generator, 2_000_000)
    truth = float((steps * (1 + p + p * p)).sum() / steps.sum())
    inside = 0
    for trial in range(trials):
        found = accept_len(measured(generator, prompts), seed=trial)
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= truth <= found.high
    return inside / trials


def test_the_interval_covers_the_truth_in_short() -> None:
    assert 0.90 <= coverage(trials=150, prompts=60) <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [30, 120])
def test_the_95_interval_covers_the_truth_in_93_to_97_of_100_of_1000_trials(prompts: int) -> None:
    assert 0.93 <= coverage(trials=1000, prompts=prompts) <= 0.97


def paired(
    generator: np.random.Generator, difference: float, n: int = 500
) -> tuple[list[Counts], list[Counts]]:
    steps = 1000  # so that whole tokens do not round the difference away
    base = generator.normal(2.1, 0.4, n)
    other = base + generator.normal(difference, 0.3, n)
    return tuple(  # type: ignore[return-value]
        [row(f"{i:03d}", round(v * steps), steps) for i, v in enumerate(values)]
        for values in (base, other)
    )


def called(trials: int, difference: float) -> float:
    generator = np.random.default_rng(5)
    verdicts = [compare(*paired(generator, difference)).verdict for _ in range(trials)]
    wanted = ("better",) if difference else ("better", "worse")
    return sum(v in wanted for v in verdicts) / trials


def test_a_paired_difference_of_0_05_is_found_in_short() -> None:
    assert called(25, 0.05) >= 0.8
    assert called(25, 0.0) <= 0.2


@pytest.mark.slow
def test_a_paired_difference_of_0_05_is_found_with_power_90_and_falsely_called_in_6_of_100() -> (
    None
):
    assert called(1000, 0.05) >= 0.90
    assert called(1000, 0.0) <= 0.06


def test_the_verdict_is_plain() -> None:
    a, b = paired(np.random.default_rng(1), 0.12)
    assert re.fullmatch(r"better by 0\.\d\d \+- 0\.0\d", str(compare(a, b)))
    assert str(compare(b, a)).startswith("worse by 0.1")
    assert compare(a, a).verdict == "no difference shown"
    assert compare(a, a).difference.value == 0


def test_a_paired_interval_is_narrower_than_two_separate_ones() -> None:
    a, b = paired(np.random.default_rng(2), 0.05)
    both = compare(a, b).difference
    assert both.half_width is not None
    assert both.half_width < (accept_len(a).half_width or 0) + (accept_len(b).half_width or 0)


def test_measurements_of_other_prompts_are_not_compared() -> None:
    with pytest.raises(MeasurementError, match="not of the same prompts: 2 stand in one alone"):
        compare([row("a", 3, 2), row("b", 3, 2)], [row("a", 3, 2), row("c", 3, 2)])


def test_uncut_steps_deliver_what_the_chain_predicts() -> None:
    generator = np.random.default_rng(3)
    hits = np.cumprod(generator.random((200_000, STEPS)) < 0.6, axis=1)
    tokens = len(hits) + int(hits.sum())
    eligible, accepted = (len(hits), int(hits[:, 0].sum())), tuple(int(h) for h in hits.sum(0))
    rows = [row("a", tokens, len(hits), eligible=eligible, accepted=accepted)]
    assert predicted_accept_len(conditional_acceptance(rows)) == pytest.approx(tokens / len(hits))
    assert tokens / len(hits) == pytest.approx(chain_accept_len(0.6, STEPS), abs=0.01)
