"""Evaluation on a tiny target's real states: figures, refusals, and a live sitting with two real servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from datagen.cli import app as cli
from datagen.cli.evaluate import print_evaluation
from datagen.drafter.checkpoint import load_drafter
from datagen.drafter.model import Drafter
from datagen.errors import ConfigError, DatagenError, MeasurementError
from datagen.evaluate import evaluate, evaluate_config
from datagen.finetune import finetune, finetune_config
from datagen.report.render import write_report
from tests.acceptance import briefly
from tests.drafter.run import tiny_target, write_run
from tests.tiny import serving, write_tiny_profile

STEPS = 2


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a drafter trained on its train split for a moment."""
    folder = tmp_path_factory.mktemp("evaluate")
    checkpoint = tiny_target(folder)
    manifest = write_run(folder / "run", checkpoint, train=40, heldout=12)
    content = json.loads(manifest.read_text())
    content["settings"]["max_new_tokens"] = 14
    manifest.write_text(json.dumps(content))
    config = finetune_config(
        manifest=str(manifest), target_weights=str(checkpoint), depths=3, learning_rate=1e-2,
        max_steps=40, batch_tokens=128, heldout=4, draft_vocab=256, device="cpu",
        export_dtype="float32", evaluate_every=100, checkpoint_every=100, log_every=100,
    )  # fmt: skip
    finetune(config, lambda _: None)
    return folder


def settings(bench: Path, **changes: Any) -> dict[str, Any]:
    return {
        "manifest": str(bench / "run" / "manifest.json"), "steps": STEPS, "device": "cpu",
        "target_weights": str(bench / "tiny-llama"), **changes,
    }  # fmt: skip


def run(bench: Path, **changes: Any) -> dict[str, Any]:
    return evaluate(evaluate_config(**settings(bench, **changes)), lambda _: None)


@pytest.fixture(scope="module")
def random_drafter(bench: Path) -> Path:
    trained = load_drafter(bench / "run" / "drafter" / "finetuned" / "final").drafter
    other = Drafter(trained.config)
    other.initialise(8)
    other.d2t.copy_(trained.d2t)
    other.t2d.copy_(trained.t2d)
    from datagen.embedded.model import Llama

    model = Llama.load(bench / "tiny-llama", "float32")
    return briefly.export(other, model, bench / "random-drafter")


def test_what_was_learnt_is_accepted_and_the_file_holds_every_figure(bench: Path) -> None:
    result = run(bench)
    replay = result["replay"]
    assert 1.3 < replay["accept_len"]["value"] <= STEPS + 1
    assert (
        replay["accept_len"]["low"] < replay["accept_len"]["value"] < replay["accept_len"]["high"]
    )
    assert replay["accept_len"]["value"] == replay["tokens"] / replay["verify_steps"]
    assert len(replay["conditional_acceptance"]) == STEPS
    assert result["split"]["disjoint_from_training"] == "proven"
    assert result["drafter"]["trained_samples"] == 40
    assert {"source", "category", "language", "tools", "thinking", "length"} <= set(
        replay["slices"]
    )
    assert result["verdict"]["answer"] == "unknown"
    assert json.loads((bench / "run" / "evaluation" / "finetuned.json").read_text()) == json.loads(
        json.dumps(result)
    )


def test_break_even_figures_decide(bench: Path) -> None:
    pays = run(bench, baseline=20.0, cycle_ms=25.0, targets="60")
    assert pays["verdict"]["answer"] == "pays", "0.5 tokens a cycle suffice"
    assert pays["verdict"]["sentence"].startswith("This drafter pays: accept_len ")
    lost = run(bench, baseline=200.0, cycle_ms=25.0)
    assert lost["verdict"]["answer"] == "does not pay"
    assert "cannot deliver 5.00 tokens a cycle at any accuracy" in lost["verdict"]["next_step"]
    assert lost["break_even"]["requirements"][0]["acceptance"] is None


def test_two_drafters_are_compared_in_pairs(bench: Path, random_drafter: Path) -> None:
    result = run(bench, against=str(random_drafter), name="compared")
    assert result["comparison"]["verdict"] == "better"
    assert result["comparison"]["text"].startswith("better by ")
    worse = run(
        bench, drafter=str(random_drafter), name="random",
        against=str(bench / "run" / "drafter" / "finetuned" / "final"),
    )  # fmt: skip
    assert worse["comparison"]["verdict"] == "worse"
    assert worse["split"]["disjoint_from_training"].startswith(
        "not proven: the drafter does not say"
    )


def test_the_command_prints_the_sentence(bench: Path) -> None:
    asked = [
        "evaluate", str(bench / "run"), "--steps", "2", "--baseline", "20", "--cycle-ms", "25",
        "--target-weights", str(bench / "tiny-llama"),
    ]  # fmt: skip
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, asked)
    assert done.exit_code == 0, done.output
    assert "This drafter pays: accept_len" in done.output
    assert "disjoint from training" in done.output


def refused(
    bench: Path, says: str, kind: type[DatagenError] = MeasurementError, **changes: Any
) -> None:
    with pytest.raises(kind, match=says):
        run(bench, **changes)


def test_held_out_prompts_that_were_trained_on_are_refused(bench: Path, tmp_path: Path) -> None:
    """Its held-out prompts are 30..35, which the drafter saw in the other run's training split."""
    other = write_run(tmp_path / "run", bench / "tiny-llama", train=4, heldout=6, first=26)
    drafter = str(bench / "run" / "drafter" / "finetuned" / "final")
    refused(bench, "trained on 6 of the 6 prompts", manifest=str(other), drafter=drafter)


def test_a_manifest_that_overlaps_itself_is_refused(bench: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "run", bench / "tiny-llama", train=4, heldout=2, overlap=True)
    drafter = str(bench / "run" / "drafter" / "finetuned" / "final")
    refused(bench, "in the training data too", ConfigError, manifest=str(other), drafter=drafter)


def test_an_empty_held_out_set_is_refused(bench: Path) -> None:
    refused(bench, "'nowhere' holds no response of two tokens", split="nowhere")


def test_a_drafter_of_other_boundaries_is_refused(bench: Path, tmp_path: Path) -> None:
    final = tmp_path / "other"
    shutil.copytree(bench / "run" / "drafter" / "finetuned" / "final", final)
    config = json.loads((final / "config.json").read_text())
    config["datagen"]["boundaries"] = [1, 2, 4]
    (final / "config.json").write_text(json.dumps(config))
    refused(bench, r"boundaries is \(1, 2, 4\), that of the states \(1, 3, 4\)", drafter=str(final))


def test_settings_that_make_no_sense_are_refused(bench: Path) -> None:
    refused(bench, "needs two servers", ConfigError, live="http://127.0.0.1:1")
    refused(bench, "needs both figures", ConfigError, baseline=80.0)
    refused(bench, "not a list of numbers", ConfigError, concurrencies="1,x")
    refused(bench, "concurrencies", ConfigError, concurrencies="0,4")
    refused(bench, "concurrencies", ConfigError, concurrencies="")
    refused(bench, "unknown dtype 'float8'", dtype="float8")
    refused(bench, "no drafter config", ConfigError, drafter=str(bench / "nothing"))


# -- live ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(bench: Path) -> Iterator[tuple[str, str, Path]]:
    """URLs of a server without and with the drafter, and the profile."""
    checkpoint = bench / "tiny-llama"
    drafter = str(bench / "run" / "drafter" / "finetuned" / "final")
    more = ("--drafter", drafter, "--draft-steps", str(STEPS))
    with (
        serving(str(checkpoint), bench, name="plain") as plain,
        serving(str(checkpoint), bench, name="drafting", more=more) as drafting,
    ):
        profile = write_tiny_profile(bench / "tiny.yaml", checkpoint, plain.url)
        yield plain.url, drafting.url, profile


def test_a_live_sitting_agrees_with_replay(bench: Path, servers: tuple[str, str, Path]) -> None:
    plain, drafting, profile = servers
    result = run(
        bench, live=drafting, baseline_url=plain, target=str(profile), concurrencies="1,4",
        rounds=2, live_prompts=5, name="live",
    )  # fmt: skip
    live, parity = result["live"], result["parity"]
    assert live["different_outputs"] == []
    assert parity["differ"] == {}
    assert parity["replay_steps"] == parity["live_steps"] > 0
    assert live["accept_len_raw"] >= live["accept_len"]["value"] > 1
    assert [s["concurrency"] for s in live["speeds"]] == [1, 4]
    for speed in live["speeds"]:  # or the break-even would contradict the rates
        delivered = speed["speculative_tokens_per_s"] * speed["cycle_ms"] / 1000
        assert delivered == pytest.approx(live["accept_len"]["value"])
    assert live["servers"]["speculative"]["speculative_algorithm"] == "EAGLE3"
    assert result["verdict"]["answer"] in ("pays", "does not pay", "undecided")
    assert result["break_even"]["cycle_ms"] == live["speeds"][0]["cycle_ms"]


def test_a_grid_measures_servers_it_starts_and_servers_that_run(
    bench: Path, servers: tuple[str, str, Path]
) -> None:
    """One setting runs already, one is started and stopped here, one cannot be, and says why."""
    plain, drafting, profile = servers
    embedded = bench / "embedded.yaml"
    embedded.write_text(json.dumps({**json.loads(profile.read_text()), "embedded": True}))
    grid = {
        "model_path": str(bench / "tiny-llama"), "baseline": {"url": plain},
        "settings": [
            {"name": "there", "url": drafting},
            {"name": "one", "steps": 1,
             "environment": {"OMP_NUM_THREADS": "1", "HF_TOKEN": "s3cret"}},
            {"name": "tree", "steps": 3, "topk": 2, "draft_tokens": 6},
        ],
    }  # fmt: skip
    (bench / "grid.yaml").write_text(json.dumps(grid))  # JSON is YAML
    result = run(
        bench, grid=str(bench / "grid.yaml"), target=str(embedded), live_dtype="float32", rounds=1,
        concurrencies="1,2", live_prompts=4, name="grid",
    )  # fmt: skip
    there, one, tree = result["grid"]["settings"]
    assert "error" not in one, one["error"]
    assert (there["steps"], one["steps"]) == (STEPS, 1)
    assert tree["error"].startswith("setting 'tree': the embedded target drafts chains")
    assert one["environments"]["speculative"]["OMP_NUM_THREADS"] == "1"
    assert "s3cret" not in (bench / "run" / "evaluation" / "grid.json").read_text()
    for row in (there, one):
        assert [b["batch"] for b in row["break_even_by_batch"]] == [1, 2]
    assert 1 < one["replay_accept_len"]["value"] <= 2
    assert there["replay_accept_len"] == result["replay"]["accept_len"]
    assert 1 < one["accept_len"]["value"] <= 2
    assert [b["concurrency"] for b in result["grid"]["best"]] == [1, 2]
    assert "Setting '" in result["verdict"]["sentence"]
    assert (
        (bench / "run" / "evaluation" / "grid.logs" / "one.log").read_text().startswith("serving")
    )
    markdown = write_report(bench / "run")[1].read_text()
    assert "Grid of draft settings" in markdown
    assert "| tree | not measured: setting 'tree'" in markdown


def test_one_server_at_a_time_gives_the_same_accept_len(
    bench: Path, servers: tuple[str, str, Path]
) -> None:
    plain, drafting, profile = servers
    grid = {"together": False, "baseline": {"url": plain},
            "settings": [{"name": "there", "url": drafting}]}  # fmt: skip
    (bench / "turns.yaml").write_text(json.dumps(grid))
    given = {"target": str(profile), "rounds": 1, "live_prompts": 3, "name": "refused"}
    (row,) = run(bench, grid=str(bench / "turns.yaml"), **given)["grid"]["settings"]
    assert row["baseline_drift"] > 0
    assert row["accept_len"]["value"] > 1


def test_a_sitting_and_a_grid_in_one_evaluation_are_plain_values(
    bench: Path, servers: tuple[str, str, Path]
) -> None:
    """The sitting's verdict counts; what is returned can be printed as JSON."""
    plain, drafting, profile = servers
    grid = {"baseline": {"url": plain}, "settings": [{"name": "there", "url": drafting}]}
    (bench / "both.yaml").write_text(json.dumps(grid))
    result = run(
        bench, live=drafting, baseline_url=plain, grid=str(bench / "both.yaml"),
        target=str(profile), rounds=1, live_prompts=2, name="refused",
    )  # fmt: skip
    assert json.loads(json.dumps(result))["grid"].keys() == {"together", "settings", "best"}
    assert "Setting '" not in result["verdict"]["sentence"]


def test_a_servers_last_words_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    said = "no file [/opt/kernels.so]"
    result = {
        "drafter": {"path": "d"}, "split": {"prompts": 1, "disjoint_from_training": "proven"},
        "replay": {"accept_len": {"value": 2.0, "low": None, "high": None}, "tokens": 9,
                   "conditional_acceptance": [0.5], "looping_share": 0.0},
        "grid": {"settings": [{"name": "k2", "error": said}]},
        "verdict": {"sentence": "No.", "next_step": "More."},
    }  # fmt: skip
    print_evaluation(result)
    assert f"not measured: {said}" in capsys.readouterr().out


def test_a_grid_of_which_nothing_can_be_measured_is_refused(
    bench: Path, servers: tuple[str, str, Path]
) -> None:
    plain, _, profile = servers
    grid = {"baseline": {"url": plain}, "settings": [{"name": "itself", "url": plain}]}
    (bench / "nothing.yaml").write_text(json.dumps(grid))
    refused(bench, "no setting of the grid .* speculates with nothing", name="refused",
            grid=str(bench / "nothing.yaml"), target=str(profile))  # fmt: skip


def test_servers_that_cannot_be_compared_are_refused(
    bench: Path, servers: tuple[str, str, Path]
) -> None:
    plain, drafting, profile = servers
    given = {"target": str(profile), "name": "refused"}
    refused(bench, "speculates with nothing, not EAGLE3", live=plain, baseline_url=plain, **given)
    refused(bench, "the baseline server drafts too", live=drafting, baseline_url=drafting, **given)
    refused(
        bench, "the server drafts 2 tokens a cycle, replay 3", live=drafting, baseline_url=plain,
        steps=3, **given,
    )  # fmt: skip


@pytest.mark.slow
def test_a_server_that_accepts_nothing_is_refused(
    bench: Path, servers: tuple[str, str, Path], random_drafter: Path
) -> None:
    plain, _, profile = servers
    given = {"target": str(profile), "name": "refused"}
    more = ("--drafter", str(random_drafter), "--draft-steps", str(STEPS))
    with serving(str(bench / "tiny-llama"), bench, name="random", more=more) as hopeless:
        refused(
            bench, "accept_len is 1.0 on all", live=hopeless.url, baseline_url=plain,
            live_prompts=3, rounds=1, **given,
        )  # fmt: skip


def test_the_report_shows_what_was_measured(bench: Path) -> None:
    run(bench, baseline=20.0, cycle_ms=25.0, name="finetuned")
    html, markdown = write_report(bench / "run")
    page, text = html.read_text(), markdown.read_text()
    assert page.count('<svg class="plot"') >= 5
    assert "This drafter pays" in page
    assert "This drafter pays" in text
    for word in ("What was collected", "accept_len by slice", "Break-even", "Throughput"):
        assert word in text, word
