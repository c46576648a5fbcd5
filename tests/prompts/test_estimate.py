"""What a plan costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.prompts.estimate import (
    RatioCounter,
    Speed,
    disk_check,
    estimate_plan,
    histogram_lines,
)
from datagen.store.plan import PlannedPrompt
from datagen.target.profile import load_profile

KIMI = load_profile("kimi-k2.5")


def prompt(tokens: int, turns: int = 1, **more: object) -> PlannedPrompt:
    plain = {
        "prompt_id": "0" * 64, "messages": "[]", "tools": None, "thinking": None, "split": "train",
        "n_turns": turns, "prompt_tokens": tokens, "max_new_tokens": 4096, "source": "s",
        "category": None, "language": None, "licence": "MIT", "partition": 0,
    }  # fmt: skip
    return PlannedPrompt(**(plain | more))  # type: ignore[arg-type]


def test_kimi_takes_57344_bytes_a_token() -> None:
    estimate = estimate_plan([prompt(200)], KIMI, answer_tokens=800)
    assert estimate.bytes_per_token == 57_344
    assert estimate.cost.captured_tokens == 1000
    assert estimate.cost.stored_bytes["raw"] == 57_344_000
    assert estimate.cost.stored_bytes["mantissa-4"] == 28_672_000


@given(st.integers(1, 8), st.integers(1, 500), st.integers(1, 900))
def test_the_formula_is_the_sum_over_the_turns(turns: int, each: int, answer: int) -> None:
    estimate = estimate_plan([prompt(each * turns, turns)], KIMI, answer_tokens=answer)
    by_turn = [each * k + answer * k for k in range(1, turns + 1)]
    assert estimate.cost.captured_tokens == sum(by_turn)
    assert estimate.cost.generated_tokens == turns * answer


def test_hours_follow_from_the_stated_speed_and_scale_with_the_prompts() -> None:
    speed = Speed(
        generate_tokens_per_s=100, prefill_tokens_per_s=1000, gpus_per_server=8, servers=2
    )
    estimate = estimate_plan([prompt(200)] * 10, KIMI, answer_tokens=800, speed=speed)
    assert estimate.cost.hours == pytest.approx((8000 / 100 + 10_000 / 1000) / 3600 / 2)
    assert estimate.cost.gpu_hours == pytest.approx(estimate.cost.hours * 16)
    assert [c.prompts for c in estimate.scale] == [10_000, 37_000, 83_000, 1_400_000]
    assert estimate.scale[0].hours == pytest.approx(estimate.cost.hours * 1000)
    assert estimate_plan([prompt(200)], KIMI).cost.hours is None


def test_an_answer_is_never_longer_than_its_limit() -> None:
    estimate = estimate_plan([prompt(10, max_new_tokens=50)], KIMI, answer_tokens=800)
    assert estimate.cost.generated_tokens == 50


def test_kinds_are_counted() -> None:
    rows = [
        prompt(5, split="heldout", language="zh", thinking=True),
        prompt(9, turns=3, tools="[]", thinking=False),
    ]
    estimate = estimate_plan(rows, KIMI)
    assert estimate.prompts_by_split == {"heldout": 1, "train": 1}
    assert estimate.samples_by_split == {"heldout": 1, "train": 3}
    assert (estimate.multi_turn, estimate.with_tools, estimate.thinking_on) == (1, 1, 1)
    assert estimate.languages == {"zh": 1, "untagged": 1}
    assert estimate.histogram == ((4, 7, 1), (8, 15, 1))
    assert all("█" in line for line in histogram_lines(estimate))


def test_an_empty_plan_costs_nothing() -> None:
    estimate = estimate_plan([], KIMI)
    assert estimate.cost.prompts == estimate.cost.stored_bytes["raw"] == 0
    assert estimate.as_dict()["histogram"] == ()


def test_the_disk_is_looked_at_where_the_run_will_be(tmp_path: Path) -> None:
    place = tmp_path / "not" / "yet"
    assert disk_check(place, 1).enough
    assert not disk_check(place, 1 << 60).enough


def test_a_guessed_count_says_its_ratio_and_grows_with_the_text() -> None:
    counter = RatioCounter()
    short, long, chinese = counter.count_many(
        [
            ([{"role": "user", "content": c}], None, None)
            for c in ("hello", "hello " * 100, "東京" * 50)
        ]
    )
    assert (short, long, chinese) == (7, 156, 81)
    assert "4 ASCII" in counter.ratio
    assert counter.digest.startswith("estimated")
