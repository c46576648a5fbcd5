"""The one sentence, from figures whose answer is known."""

from __future__ import annotations

from datagen.acceptance.live import Speed
from datagen.acceptance.metrics import Interval
from datagen.acceptance.verdict import judged


def found(value: float, half: float = 0.05) -> Interval:
    return Interval(value, value - half, value + half, 100)


def sitting(baseline: float, cycle_ms: float, accept_len: float) -> Speed:
    rate = accept_len / cycle_ms * 1000
    return Speed(1, baseline, rate, baseline, rate, cycle_ms, rate / baseline)


def test_the_founding_case_does_not_pay() -> None:
    verdict = judged(found(2.05), steps=2, baseline=82, cycle_ms=30)
    assert verdict.answer == "does not pay"
    assert "accept_len 2.050 [2.000, 2.100] at K = 2 against 2.46" in verdict.sentence
    assert "from 64% to 81%" in verdict.next_step


def test_the_interval_decides_against_break_even() -> None:
    assert judged(found(2.6), steps=2, baseline=82, cycle_ms=30).answer == "pays"
    open_ = judged(found(2.46), steps=2, baseline=82, cycle_ms=30)
    assert open_.answer == "undecided"
    assert "more held-out prompts" in open_.next_step


def test_without_a_server_nothing_is_claimed() -> None:
    assert judged(found(2.6), steps=2).answer == "unknown"


def test_a_goal_beyond_the_chain_names_the_k_it_takes() -> None:
    verdict = judged(found(2.9), steps=2, baseline=150, cycle_ms=30)
    assert verdict.answer == "does not pay"
    assert "at least K = 4" in verdict.next_step


def test_a_sittings_own_rates_decide() -> None:
    assert judged(found(2.0), steps=3, measured=sitting(80, 20, 2.0)).answer == "pays"
    lost = judged(found(2.0), steps=3, measured=sitting(80, 30, 2.0))
    assert lost.answer == "does not pay"
    assert "(0.83x)" in lost.sentence


def test_a_cycle_shorter_than_a_plain_step_is_not_believed() -> None:
    verdict = judged(found(1.08), steps=3, measured=sitting(2.7, 172.5, 1.08))
    assert verdict.answer == "undecided"
    assert "a verify cycle took 172.5 ms, a plain step of the baseline 370.4 ms" in verdict.sentence


def test_rounds_that_do_not_agree_decide_nothing() -> None:
    split = Speed(1, 80.0, 84.0, 80.0, 84.0, 30.0, 1.05, (0.98, 1.12))
    said = judged(found(2.5), steps=3, measured=split)
    assert said.answer == "undecided"
    assert said.next_step.startswith("Its rounds gave 0.98x to 1.12x")
    agreed = Speed(1, 80.0, 84.0, 80.0, 84.0, 30.0, 1.05, (1.02, 1.12))
    assert judged(found(2.5), steps=3, measured=agreed).answer == "pays"
