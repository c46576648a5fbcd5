"""The probe: nested subsets, a curve, a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datagen.errors import ConfigError
from datagen.evaluate.probe import _sentence, probe
from datagen.finetune import FinetuneConfig, finetune_config
from tests.drafter.run import tiny_target, write_run


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    write_run(folder / "run", tiny_target(folder), train=32, heldout=6)
    return folder


def training(bench: Path, **changes: Any) -> FinetuneConfig:
    return finetune_config(
        manifest=str(bench / "run" / "manifest.json"), out=str(bench / "run" / "drafter" / "probe"),
        target_weights=str(bench / "tiny-llama"), depths=2, learning_rate=1e-2, max_steps=8,
        batch_tokens=128, heldout=4, draft_vocab=256, device="cpu", evaluate_every=100,
        checkpoint_every=100, log_every=100, **changes,
    )  # fmt: skip


def run(bench: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "steps": 2,
        "baseline": 82.0,
        "cycle_ms": 30.0,
        "fractions": (0.125, 0.25, 0.5),
        **changes,
    }
    return probe(
        training(bench), notify=lambda _: None, device="cpu",
        target_weights=str(bench / "tiny-llama"), **given,
    )  # fmt: skip


def test_nested_subsets_give_a_curve_and_a_sentence_and_again_at_once(bench: Path) -> None:
    said: list[str] = []
    result = probe(
        training(bench), steps=2, baseline=82.0, cycle_ms=30.0, notify=said.append,
        fractions=(0.125, 0.25, 0.5), device="cpu", target_weights=str(bench / "tiny-llama"),
    )  # fmt: skip
    assert [p["samples"] for p in result["curve"]] == [4, 8, 16]
    assert result["needed"] == pytest.approx(2.46)
    assert "32 samples" in result["sentence"]
    assert result["cost"]["full run"]["stored_bytes"] > 0
    assert "TB of states and" in result["sentence"]
    assert json.loads((bench / "run" / "probe.json").read_text())["curve"] == result["curve"]
    assert sorted(p.name for p in (bench / "run" / "evaluation").iterdir()) == [
        "probe-16.json", "probe-4.json", "probe-8.json",
    ]  # fmt: skip
    again = run(bench)
    assert again["curve"] == result["curve"], "finished drafters are not trained again"


def test_too_few_samples_for_three_sizes_are_refused(bench: Path) -> None:
    with pytest.raises(ConfigError, match="a curve needs three"):
        run(bench, fractions=(0.5, 1.0))
    with pytest.raises(ConfigError, match="none above the whole"):
        run(bench, fractions=(0.5, 1.0, 2.0))


def test_the_sentence_follows_the_interval() -> None:
    assert _sentence(9, 2.0, 2.5, 2.1, 2.9, "x").startswith("The full run of 9 samples can be")
    assert _sentence(9, 3.0, 2.5, 2.1, 2.9, "x").startswith("The full run of 9 samples cannot")
    assert "is open" in _sentence(9, 2.5, 2.5, 2.1, 2.9, "x")
    assert "no interval" in _sentence(9, 2.5, 2.5, None, None, "x")
