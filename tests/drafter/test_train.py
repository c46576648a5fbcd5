"""Training on real states of the tiny target: it learns, repeats, resumes, and refuses what is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from datagen.drafter.checkpoint import load_drafter
from datagen.drafter.curves import read_metrics
from datagen.drafter.settings import TrainConfig
from datagen.drafter.state import read_provenance
from datagen.drafter.step import depth_weights, row_loss
from datagen.errors import ConfigError, DatagenError, FingerprintMismatch, TrainingFailed
from datagen.finetune import finetune, finetune_config
from tests.drafter.run import tiny_target, write_run

BASE: dict[str, Any] = {
    "batch_tokens": 64, "depths": 3, "learning_rate": 3e-3, "max_steps": 12, "heldout": 4,
    "draft_vocab": 256, "device": "cpu", "export_dtype": "float32", "checkpoint_every": 5,
    "evaluate_every": 6, "log_every": 4, "accumulate": 2, "ema": 0.9,
}  # fmt: skip


LEARNING: dict[str, Any] = {
    "max_steps": 40, "learning_rate": 1e-2, "ema": 0.0, "batch_tokens": 128, "accumulate": 1,
    "evaluate_every": 100, "checkpoint_every": 100, "log_every": 12,
}  # fmt: skip


DIES_IN_STEP_9 = """
import os, signal
from datagen.cli import main
from datagen.drafter import train
rate = train.learning_rate
def rate_or_death(number, *rest):
    if number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(number, *rest)
train.learning_rate = rate_or_death
main()
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    write_run(folder / "run", tiny_target(folder), train=40, heldout=6)
    return folder


def settings(bench: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        **BASE, "manifest": str(bench / "run" / "manifest.json"), "out": str(out),
        "target_weights": str(bench / "tiny-llama"), **changes,
    }  # fmt: skip


def train(bench: Path, out: Path, stop_after: int = 0, **changes: Any) -> Any:
    config = finetune_config(**settings(bench, out, **changes))
    calls = iter(range(1, 10_000))
    return finetune(config, lambda _: None, lambda: next(calls) == stop_after)


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(bench: Path) -> Path:
    train(bench, bench / "undisturbed")
    return bench / "undisturbed"


def test_a_fresh_drafter_learns_and_its_metrics_say_so(bench: Path, tmp_path: Path) -> None:
    outcome = train(bench, tmp_path / "out", **LEARNING)
    before, after = (o["predicted_accept_len"] for o in (outcome.before, outcome.after))
    assert after > before + 0.2, (before, after)
    assert after > 1.0 + outcome.after["best_constant"]
    assert outcome.after["target_agreement"] > 0.9
    logged = [r["loss"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in r]
    # Lines over whole passes fall; a line over fewer samples than that says which those were.
    assert logged[0] > 1.2 * logged[1] > 1.2 * 1.2 * logged[2], logged
    loaded = load_drafter(outcome.final)
    assert loaded.drafter.config.boundaries == (1, 3, 4)
    kept = read_provenance(outcome.final)
    assert kept["heldout"] == outcome.after
    assert kept["vocab_sha256"] == loaded.vocab.digest
    assert set(kept["vocab_coverage"]) == {"all", "language:en", "source:made-up"}
    assert kept["vocab_coverage"]["all"] == 1.0, "fewer tokens occur than the map holds"
    again = train(bench, tmp_path / "warm", init=str(outcome.final), max_steps=1, ema=0.0)
    assert again.before["predicted_accept_len"] == pytest.approx(after, abs=0.02)


def test_equal_seeds_give_equal_weights_and_others_do_not(
    bench: Path, undisturbed: Path, tmp_path: Path
) -> None:
    again = train(bench, tmp_path / "again", checkpoint_every=100, threads=1, ahead=1)
    assert digest(again.final) == digest(undisturbed / "final")
    other = train(bench, tmp_path / "other", seed=1)
    assert digest(other.final) != digest(undisturbed / "final")


@pytest.mark.parametrize("after", [1, 7])
def test_stopped_and_resumed_training_ends_bit_identical(
    bench: Path, undisturbed: Path, tmp_path: Path, after: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(DatagenError, match=f"after step {after} of 12"):
        train(bench, out, stop_after=after)
    assert not (out / "final").exists()
    outcome = train(bench, out)
    assert digest(outcome.final) == digest(undisturbed / "final")
    logged = [(r["kind"], r["step"]) for r in read_metrics(out / "metrics.jsonl")]
    assert logged == [
        ("heldout", 0), ("train", 4), ("heldout", 6), ("train", 8), ("train", 12), ("heldout", 12),
    ]  # fmt: skip
    first = read_metrics(out / "metrics.jsonl")[0]
    assert outcome.before.items() <= first.items()


def test_killed_without_warning_and_resumed_it_ends_bit_identical(
    bench: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = [
        f"--{'compile' if k == 'compile' else k.replace('_', '-')}={v}"
        for k, v in settings(bench, out).items()
        if k != "manifest"
    ]
    manifest = str(bench / "run" / "manifest.json")
    killed = subprocess.run(
        [sys.executable, "-c", DIES_IN_STEP_9, "finetune", manifest, *flags],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert [p.name for p in out.glob("checkpoints/*")] == ["step-000005"]
    outcome = train(bench, out)
    assert digest(outcome.final) == digest(undisturbed / "final")


def test_a_finished_run_is_left_alone_and_other_settings_are_refused(
    bench: Path, undisturbed: Path
) -> None:
    before = {
        p: p.stat().st_mtime_ns
        for p in undisturbed.rglob("*.*")
        if p.is_file() and p.name != ".lock"
    }
    outcome = train(bench, undisturbed)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert outcome.steps == 12
    with pytest.raises(FingerprintMismatch, match=r"learning_rate is 0\.1, was 0\.003"):
        train(bench, undisturbed, learning_rate=0.1)


def test_a_run_from_before_a_setting_existed_was_made_as_its_default_makes_it(
    bench: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    stored = [*out.glob("*/provenance.json"), *out.glob("checkpoints/*/provenance.json")]
    assert len(stored) == 3
    for path in stored:
        kept = json.loads(path.read_text())
        assert kept["settings"].pop("optimizer") == "adamw"
        path.write_text(json.dumps(kept))
    assert train(bench, out).steps == 12
    shutil.rmtree(out / "final")
    with pytest.raises(FingerprintMismatch, match="settings: optimizer is muon, was adamw"):
        train(bench, out, optimizer="muon")
    assert digest(train(bench, out).final) == digest(undisturbed / "final")


def test_the_logged_loss_is_that_of_a_row_whatever_share_of_the_tokens_trains() -> None:
    """Divided by all tokens, as it is minimised, it halves when a batch holds twice the context."""
    config = TrainConfig(depths=2)
    per_row, rows = [4.0, 6.0], (100, 90)
    minimised, shown = [], []
    for tokens in (150, 1500):
        weight_K = depth_weights(config, rows, tokens, torch.device("cpu")).tolist()
        minimised.append(sum(w * n * x for w, n, x in zip(weight_K, rows, per_row, strict=True)))
        shown.append(row_loss(per_row, config.decay))
    assert minimised[0] == pytest.approx(10 * minimised[1])
    assert shown[0] == shown[1] == pytest.approx((4.0 + 0.8 * 6.0) / 1.8)


def test_neither_packing_nor_accumulation_changes_the_loss(bench: Path, tmp_path: Path) -> None:
    losses = []
    for tokens, accumulate in ((2048, 1), (64, 100)):
        out = tmp_path / f"{tokens}"
        train(
            bench, out, batch_tokens=tokens, max_tokens=64, accumulate=accumulate, max_steps=2,
            log_every=1, ema=0.0,
        )  # fmt: skip
        losses.append([r["loss"] for r in read_metrics(out / "metrics.jsonl") if "loss" in r])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["lk", "ce"])
def test_other_losses_train_too(bench: Path, tmp_path: Path, loss: str) -> None:
    outcome = train(bench, tmp_path / "out", loss=loss, normalise="masked", **LEARNING)
    gained = outcome.after["predicted_accept_len"] - outcome.before["predicted_accept_len"]
    assert gained > 0.1, gained


def refused(bench: Path, tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(DatagenError) as caught:
        train(bench, tmp_path / "out", **changes)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edited(bench: Path, undisturbed: Path, tmp_path: Path, **config: Any) -> Path:
    init = tmp_path / "init"
    shutil.copytree(undisturbed / "final", init)
    raw = json.loads((init / "config.json").read_text())
    (init / "config.json").write_text(json.dumps({**raw, **config}))
    return init


def test_a_poisoned_sample_stops_training_and_is_named(tmp_path: Path) -> None:
    checkpoint = tiny_target(tmp_path)
    write_run(tmp_path / "run", checkpoint, train=6, heldout=2, poison=3)
    from tests.store.rows import prompt_id

    text = refused(tmp_path, tmp_path, max_steps=4)
    assert "no number" in text
    assert f"{prompt_id(3)}-0" in text
    assert f"{prompt_id(2)}-0" not in text


def test_heldout_prompts_inside_the_training_data_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_target(tmp_path)
    write_run(tmp_path / "run", checkpoint, train=4, heldout=2)
    other = write_run(tmp_path / "other", checkpoint, train=2, heldout=2, first=2, overlap=True)
    text = refused(tmp_path, tmp_path, heldout_manifest=str(other))
    assert "2 held-out prompts are in the training data" in text


def test_a_scrambled_warm_start_is_stopped_before_any_step(
    bench: Path, undisturbed: Path, tmp_path: Path
) -> None:
    init = tmp_path / "init"
    shutil.copytree(undisturbed / "final", init)
    weights = load_file(init / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, init / "model.safetensors")
    text = refused(bench, tmp_path, init=str(init))
    assert "at chance before any training" in text
    assert "rebuilt vocabulary map" in text
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_drafter_of_another_width_names_the_flag(
    bench: Path, undisturbed: Path, tmp_path: Path
) -> None:
    init = edited(bench, undisturbed, tmp_path, num_aux_hidden_states=1)
    weights = load_file(init / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"][:, :64].contiguous()
    save_file(weights, init / "model.safetensors")
    text = refused(bench, tmp_path, init=str(init))
    assert "--speculative-algorithm EAGLE3" in text
    assert "(64 values)" in text
    assert "(192)" in text


def test_the_weights_of_another_target_are_refused(bench: Path, tmp_path: Path) -> None:
    from tests.tiny import write_tiny_checkpoint

    other = write_tiny_checkpoint(tmp_path / "tiny-llama", seed=9)
    assert "predicts" in refused(bench, tmp_path, target_weights=str(other))
    shutil.rmtree(tmp_path / "out")
    assert "--target-weights" in refused(bench, tmp_path, target_weights=str(tmp_path / "none"))


def test_a_packed_lm_head_is_refused(bench: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed"
    shutil.copytree(bench / "tiny-llama", target)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight_packed"] = torch.zeros(4, 4, dtype=torch.int32)
    save_file(weights, target / "model.safetensors")
    assert "lm_head is quantised or packed" in refused(bench, tmp_path, target_weights=str(target))


def test_a_fresh_map_over_a_warm_start_is_refused(
    bench: Path, undisturbed: Path, tmp_path: Path
) -> None:
    text = refused(bench, tmp_path, init=str(undisturbed / "final"), fresh_vocab=True)
    assert "re-point" in text


def test_the_drafter_of_another_targets_boundaries_is_refused(
    bench: Path, undisturbed: Path, tmp_path: Path
) -> None:
    init = edited(bench, undisturbed, tmp_path, datagen={"boundaries": [2, 3, 4]})
    assert "boundaries [2, 3, 4]" in refused(bench, tmp_path, init=str(init))


def test_kl_without_final_states_is_refused() -> None:
    from dataclasses import replace

    from datagen.drafter.dataset import SourceInfo
    from datagen.drafter.start import require_final_states

    info = SourceInfo("m.json", "", (1, 2), "post", 8, "m", "", {}, ())
    require_final_states(info, "kl")
    require_final_states(replace(info, final_norm="none"), "ce")
    with pytest.raises(ConfigError, match="--loss ce"):
        require_final_states(replace(info, final_norm="none"), "kl")


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match="lost"):
        finetune_config(lost=1)
    with pytest.raises(ConfigError, match="2 weights for 1 manifests"):
        finetune_config(weights="1,2")
    with pytest.raises(ConfigError, match="max_tokens exceeds"):
        finetune_config(max_tokens=100, batch_tokens=50)
    assert TrainConfig().depths == 5


def test_chance_is_the_best_fixed_guess() -> None:
    from datagen.drafter.metrics import Acceptance
    from datagen.drafter.sanity import require_better_than_chance

    result = Acceptance([1], [10])
    result.labels.update([4, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    with pytest.raises(TrainingFailed, match=r"depth 1 hits 10\.0 %"):
        require_better_than_chance(result)
    require_better_than_chance(Acceptance([3], [10], result.labels))
