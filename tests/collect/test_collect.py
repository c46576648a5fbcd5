"""The collect job from prompts to manifest, over a real server process and the real command line."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datagen.capture import spares
from datagen.store.layout import RunLayout
from datagen.store.lock import RunLock
from datagen.store.manifest import Manifest
from datagen.store.verify import verify_run
from tests.collect.harness import Bench, responses, rows_done, state_ids
from tests.target.faulty import faulty
from tests.tiny import free_port, serving, write_tiny_checkpoint

PROMPTS = 30


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("collect")
    checkpoint = write_tiny_checkpoint(folder / "tiny-llama")
    with serving(str(checkpoint), folder) as process:
        yield Bench.make(folder, process.url, prompts=PROMPTS)


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> Path:
    done = bench.collect("undisturbed")
    assert done.returncode == 0, done.stderr
    return bench.folder / "undisturbed"


def test_a_run_accounts_for_every_planned_sample(bench: Bench, undisturbed: Path) -> None:
    manifest = Manifest.load(undisturbed / "manifest.json")
    assert manifest.prompts == PROMPTS + PROMPTS // 10
    assert manifest.samples.planned > manifest.prompts, "some prompts have several turns"
    assert manifest.samples.collected == manifest.samples.planned
    assert manifest.samples.pending == 0
    assert set(manifest.splits) == {"train", "heldout"}
    assert manifest.splits["heldout"].prompts == PROMPTS // 10
    assert sum(manifest.token_frequencies.values()) == manifest.splits["train"].tokens_generated
    checked = bench.verify("undisturbed")
    assert checked.returncode == 0, checked.stderr


def test_states_are_stored_for_exactly_what_was_generated(undisturbed: Path) -> None:
    said = dict(responses(undisturbed))
    seen = list(state_ids(undisturbed))
    assert len(seen) == len(dict(seen)) == len(said)
    for sample_id, ids in seen:
        assert ids[-len(said[sample_id]) :] == said[sample_id]


async def test_a_run_hands_its_captures_back_and_leaves_the_spool_clean(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Path] = []

    def noted(path: Path, most: int) -> None:
        spares.hand_back(path, most)
        handed.append(path)
        assert (path.parent / "spare-00").exists()

    monkeypatch.setattr("datagen.target.states.hand_back", noted)
    monkeypatch.setattr(spares, "LEAST_BYTES", 1)  # here; its server has others, and takes none
    monkeypatch.setattr("datagen.collect.conversation.DISCARD_ASIDE_BYTES", 1)
    manifest = await bench.collect_here("handed-back")
    assert len(handed) == manifest.samples.collected > 0
    (spool,) = {path.parent for path in handed}
    assert not list(spool.iterdir())
    assert verify_run(bench.folder / "handed-back").ok


def test_a_later_turn_is_asked_with_the_models_own_earlier_answer(undisturbed: Path) -> None:
    contexts = dict(state_ids(undisturbed))
    second = [s for s in contexts if s.endswith("-1")]
    assert second
    for sample_id in second:
        first = contexts[sample_id.removesuffix("1") + "0"]
        shared = contexts[sample_id][: len(first) - len(dict(responses(undisturbed))[sample_id])]
        assert first[: len(shared)] == shared


def test_a_finished_run_asks_the_server_nothing(bench: Bench, undisturbed: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*.arrow")}
    again = bench.collect("undisturbed", "--endpoints", "http://127.0.0.1:9")
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*.arrow")} == before


def wait_for_rows(process: subprocess.Popen[Any], root: Path, rows: int) -> None:
    deadline = time.monotonic() + 120
    while rows_done(root) < rows:
        assert process.poll() is None, f"it ended before row {rows}"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("done_before_kill", [1, 15])
def test_resume_after_kill_keeps_every_row_once(
    bench: Bench, undisturbed: Path, tmp_path: Path, done_before_kill: int
) -> None:
    run = f"killed-{done_before_kill}"
    root = bench.folder / run
    with faulty(bench.checkpoint, tmp_path, f"stands_still:{done_before_kill}") as url:
        process = bench.start(run, "--endpoints", url)
        wait_for_rows(process, root, done_before_kill)
        process.kill()
        process.wait(60)
    assert rows_done(root) == done_before_kill
    assert not RunLayout(root).manifest.exists()
    resumed = bench.collect(run)
    assert resumed.returncode == 0, resumed.stderr
    assert dict(responses(root)) == dict(responses(undisturbed))
    assert sorted(state_ids(root)) == sorted(state_ids(undisturbed))
    assert bench.verify(run).returncode == 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_the_target_may_be_killed_and_started_again(
    bench: Bench, undisturbed: Path, tmp_path: Path, seed: int
) -> None:
    """With rows at it, which it has stopped to answer at some row between the first and the last."""
    run = f"target-killed-{seed}"
    root = bench.folder / run
    planned = len(list(state_ids(undisturbed)))
    drawn = random.Random(f"target{seed}").randint(1, planned * 2 // 3)
    checkpoint, port = str(bench.checkpoint), free_port()
    with serving(checkpoint, tmp_path, port=port, fault=f"stands_still:{drawn}") as target:
        process = bench.start(run, "--endpoints", target.url)
        wait_for_rows(process, root, drawn)
        target.kill()
    print(f"killed the target (seed {seed}) at row {rows_done(root)} of {planned}")
    time.sleep(0.5)
    with serving(checkpoint, tmp_path, port=port):
        assert process.wait(120) == 0
    assert dict(responses(root)) == dict(responses(undisturbed))
    assert sorted(state_ids(root)) == sorted(state_ids(undisturbed))
    assert bench.verify(run).returncode == 0


def test_an_interrupt_drains_and_the_same_command_goes_on(bench: Bench, undisturbed: Path) -> None:
    root = bench.folder / "interrupted"
    one_by_one = ("--concurrency", "1", "--max-concurrency", "1")  # far from its end at row 3
    process = subprocess.Popen(
        bench.command("interrupted", *one_by_one),
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    wait_for_rows(process, root, 3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "run the same command again" in said
    assert bench.verify("interrupted").returncode == 0
    assert bench.collect("interrupted").returncode == 0
    assert dict(responses(root)) == dict(responses(undisturbed))


# -- bad input: one clear line, exit 1, nothing lost -------------------------------------------


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = [line for line in done.stderr.splitlines() if line.startswith("datagen: error:")]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


def test_an_unknown_mix_is_named(bench: Bench) -> None:
    refused(bench.collect("x1", "--mix", "nonesuch"), "nonesuch", "demo")


def test_a_missing_data_file_is_named(bench: Bench) -> None:
    mix = json.loads(bench.mix.read_text())
    mix["sources"][0]["file"] = "absent.jsonl"
    path = bench.folder / "broken.yaml"
    path.write_text(json.dumps(mix))
    refused(bench.collect("x2", "--mix", str(path)), "absent.jsonl")


def test_an_unknown_target_is_named(bench: Bench) -> None:
    refused(bench.collect("x3", "--target", "gpt-17"), "gpt-17", "smollm2")


def test_an_endpoint_that_is_down_is_named(bench: Bench) -> None:
    done = bench.collect("x4", "--endpoints", "http://127.0.0.1:9")
    refused(done, "http://127.0.0.1:9", "make up")


def test_an_endpoint_serving_another_model_is_named(bench: Bench) -> None:
    profile = json.loads(bench.profile.read_text()) | {"model": "someone/another", "aliases": []}
    path = bench.folder / "another.yaml"
    path.write_text(json.dumps(profile))
    refused(bench.collect("x5", "--target", str(path)), "tiny-llama", "someone/another")


def test_a_capture_of_other_boundaries_is_refused_before_any_row(bench: Bench) -> None:
    profile = json.loads(bench.profile.read_text()) | {"boundaries": [1, 3]}
    path = bench.folder / "narrow.yaml"
    path.write_text(json.dumps(profile))
    refused(bench.collect("x6", "--target", str(path)), "EAGLE3", "256 values")
    assert not (bench.folder / "x6" / "plan.arrow").exists()


def test_resuming_under_other_settings_names_the_fields(bench: Bench, undisturbed: Path) -> None:
    done = bench.collect("undisturbed", "--max-new-tokens", "7", "--seed", "3")
    refused(done, "settings.max_new_tokens is 7, was 12", "settings.seed is 3, was 0")
    assert bench.verify("undisturbed").returncode == 0


def test_a_locked_run_names_its_holder(bench: Bench, undisturbed: Path) -> None:
    with RunLock(undisturbed / ".lock"):
        refused(bench.collect("undisturbed"), "pid", socket.gethostname())
    assert bench.collect("undisturbed").returncode == 0


def test_a_corrupt_shard_is_named_with_its_row(bench: Bench) -> None:
    assert bench.collect("corrupt").returncode == 0
    shard = next((bench.folder / "corrupt").rglob("states-000.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x10
    shard.write_bytes(content)
    checked = bench.verify("corrupt")
    assert checked.returncode == 1
    assert f"{shard.parent.name}/states-000.arrow" in checked.stderr


def test_verify_of_no_run_says_so(bench: Bench) -> None:
    refused(bench.verify("nothing-here"), "no run is here")
