"""What the benchmark of whole trainers asks of ours: each bar by itself, and none softened by noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.finetune_trainers import judged, settings_of, side_of
from datagen.acceptance.metrics import Counts, accept_len
from datagen.drafter.dataset import SampleRef


def run(tokens: int) -> list[Counts]:
    """19 samples of 40 verify steps; `tokens` more than that are delivered, all in the first."""
    return [Counts(f"p{n}-0", f"p{n}", 40 + (tokens if n == 0 else 0), 40) for n in range(19)]


def result(
    ours: tuple[int, ...], theirs: tuple[int, ...], *, speed: float = 3.0, wait: float = 0.01,
    optimizers: tuple[str, ...] = ("adamw", "muon"),
) -> dict[str, object]:  # fmt: skip
    counts = {"ours": [run(n) for n in ours], "speculators": [run(n) for n in theirs]}
    lengths = {name: [accept_len(c).value for c in runs] for name, runs in counts.items()}
    return judged(
        [
            {"supervised_tokens_per_s": speed, "wait_share": wait, "accept_len": a}
            for a in lengths["ours"]
        ],
        [
            {"supervised_tokens_per_s": 1.0, "optimizer": o, "accept_len": a}
            for o, a in zip(optimizers, lengths["speculators"], strict=True)
        ],
        counts,
    )


def missed(found: dict[str, object]) -> list[str]:
    bars = found["bars"]
    assert isinstance(bars, dict)
    assert found["passed"] is all(bars.values())
    return [name for name, held in bars.items() if not held]


def test_equal_is_enough_and_one_token_less_is_not_though_no_interval_shows_it() -> None:
    assert missed(result((10, 10), (10, 9))) == []
    found = result((9, 9), (8, 10))
    assert missed(found) == ["accept_len_at_least_theirs"]
    assert found["accept_len_verdict"] == "no difference shown"
    difference = found["accept_len_difference"]
    assert isinstance(difference, dict)
    assert difference["value"] == pytest.approx(-1 / 760)
    assert difference["low"] <= difference["value"] <= difference["high"]


def test_every_other_bar_is_its_own() -> None:
    assert missed(result((10, 10), (10, 10), speed=1.0)) == ["faster"]
    assert missed(result((10, 10), (10, 10), wait=0.05)) == ["waits_below_5_percent"]
    same = result((10, 10), (10, 10), optimizers=("adamw", "adamw"))
    assert missed(same) == ["their_optimizers_all_ran"]


def ref(number: int, turn: int) -> SampleRef:
    return SampleRef(0, 0, number, f"p{number}-{turn}", f"p{number}", 20, 8)


def test_no_prompt_that_settings_were_chosen_on_is_judged_on() -> None:
    refs = [ref(n, turn) for n in range(40) for turn in range(2)]
    for count in (0, 1, 15, 80):
        chosen, judged_on = (side_of(refs, count, aside=a) for a in (True, False))
        assert {r.prompt_id for r in chosen} & {r.prompt_id for r in judged_on} == set()
        assert sorted(chosen + judged_on, key=refs.index) == refs
        assert count <= len(chosen) <= count + 1


def test_settings_are_json_or_the_file_that_holds_them_when_they_are_read(tmp_path: Path) -> None:
    assert settings_of('{"decay": 0.5}') == {"decay": 0.5}
    where = tmp_path / "best.json"
    for decay in (0.5, 0.6):
        where.write_text(json.dumps({"decay": decay}))
        assert settings_of(f"@{where}") == {"decay": decay}
