"""What the benchmark of whole trainers asks of ours: each bar by itself, and none softened by noise."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.finetune_speculators import peer_flags
from benchmarks.finetune_trainers import (
    SHARED,
    Chosen,
    by_prompt,
    choose,
    judged,
    shared,
    side_of,
)
from datagen.acceptance.metrics import Counts, accept_len, compare
from datagen.drafter.dataset import SampleRef
from datagen.drafter.settings import RunConfig, TrainConfig


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


def test_settings_are_json_or_a_file_that_is_read_once_when_they_are_first_asked_for(
    tmp_path: Path,
) -> None:
    assert Chosen('{"decay": 0.5}').settings == {"decay": 0.5}
    where = tmp_path / "best.json"
    chosen = Chosen(f"@{where}")
    where.write_text('{"decay": 0.5}')
    assert chosen.settings == {"decay": 0.5}
    where.write_text('{"decay": 0.6}')
    assert chosen.settings == {"decay": 0.5}, "every round trains with the same"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"batch_tokens": 64, "decay": 0.5}, "cannot hold batch_tokens:"),
        ({"seed": 3, "learning_rate": 1e-4}, "cannot hold learning_rate, seed:"),
        ({"momentum": 0.9}, "unknown settings momentum"),
        ({"decay": 2}, "decay"),
    ],
)
def test_settings_that_both_share_or_nobody_has_end_the_benchmark_before_it_trains(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(SystemExit, match=told):
        Chosen(json.dumps(settings))
    with pytest.raises(SystemExit, match=told):
        choose(Namespace(aside=3, choices=json.dumps([{}, settings])), Path("unused"), lambda r: r)


GIVEN = Namespace(
    manifest=Path("m"), repeats=2, device="cuda", learning_rate=1e-3, threads=4, peer_loss="eager",
    draft_vocab=8192,
)  # fmt: skip


def test_both_trainers_are_given_the_same_but_what_ours_chooses() -> None:
    ours = shared(GIVEN, Path("out"), Path("init"), Path("target"), 4096, 5, 1)
    assert set(ours) <= SHARED
    settings = {*TrainConfig.model_fields, *RunConfig.model_fields}
    assert {"optimizer", "decay", "normalise", "loss", "weight_decay", "ema"} <= settings - SHARED
    theirs = peer_flags(GIVEN, optimizer="muon", seed=1, tokens=4096, depths=5, ratio=0.99)
    same = {
        "batch_tokens": "total-seq-len", "depths": "ttt-steps", "learning_rate": "lr",
        "warmup": "scheduler-warmup-ratio", "seed": "seed", "log_every": "log-freq",
    }  # fmt: skip
    assert {a: theirs[b] for a, b in same.items()} == {a: ours[a] for a in same}
    decays = {theirs[f"{name}weight-decay"] for name in ("", "muon-")}
    assert decays == {TrainConfig().weight_decay}


def test_the_sums_by_prompt_give_the_same_interval_as_the_samples() -> None:
    a, b = (
        [Counts(f"p{n % 7}-{n}", f"p{n % 7}", 40 + n * k % 11, 40) for n in range(19)]
        for k in (3, 5)
    )
    kept = [by_prompt(counts) for counts in (a, b)]
    assert [len(v) for k in kept for v in k.values()] == [7] * 4
    again = [
        [
            Counts(f"p{n}", f"p{n}", *both)
            for n, both in enumerate(zip(*k.values(), strict=True))
        ]
        for k in kept
    ]  # fmt: skip
    assert compare(*again) == compare(a, b)
    assert compare(a, b).difference.value != 0
