"""A profile's server, by role: what is started, and whether its settings arrived."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from datagen.errors import ConfigError
from datagen.target.launch import (
    SCHEDULER,
    Recipe,
    descendants,
    launch_recipe,
    missing_settings,
    process_environment,
    require_environment,
)
from datagen.target.profile import load_profile, profile_names
from tests.tiny import free_port

ROOT = Path(__file__).resolve().parents[2]


def recipe(target: str, role: str, **changes: object) -> Recipe:
    settings = {"python": "python", "host": "127.0.0.1", "port": 1, "spool_dir": Path("/spool")}
    return launch_recipe(load_profile(target), role, **(settings | changes))  # type: ignore[arg-type]


def test_kimis_servers_by_role() -> None:
    generate = recipe("kimi-k2.5", "generate")
    capture = recipe("kimi-k2.5", "capture")
    evaluate = recipe("kimi-k2.5", "evaluate", draft="/drafts/a b")
    for r in (generate, capture, evaluate):
        line = " ".join(r.command)
        assert "--model-path moonshotai/Kimi-K2.5" in line
        assert "--tp-size 8" in line
        assert r.environment["NCCL_P2P_LEVEL"] == "SYS"
        assert r.schedulers == 8
    assert capture.environment["DATAGEN_CAPTURE_BOUNDARIES"] == "2,30,58"
    assert capture.environment["DATAGEN_CAPTURE_DIR"] == "/spool"
    assert "--enable-return-hidden-states" in capture.command
    assert not [w for w in capture.command if w.startswith("--speculative")]
    assert not [k for k in generate.environment if k.startswith("DATAGEN_")]
    words = list(evaluate.command)
    assert words[words.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert words[words.index("--speculative-draft-model-path") + 1] == "/drafts/a b"
    assert words[words.index("--speculative-draft-model-quantization") + 1] == "unquant"


def test_kimis_profile_is_complete() -> None:
    kimi = load_profile("kimi-k2.5")
    assert (kimi.bytes_per_token, kimi.thinking_kwarg) == (57344, "thinking")
    assert kimi.tensors.lm_head == "language_model.lm_head.weight"
    assert kimi.tensors.embed_tokens == "language_model.model.embed_tokens.weight"
    assert kimi.tensors.norm == "language_model.model.norm.weight"
    assert kimi.init_drafters[0] == "AQ-MedAI/Kimi-K25-eagle3"


def test_the_documented_template_is_a_valid_profile() -> None:
    template = load_profile(str(ROOT / "docs" / "target-template.yaml"))
    made = launch_recipe(
        template, "capture", python="p", host="h", port=1, spool_dir=Path("/s"), draft=""
    )
    assert made.schedulers == template.launch.gpus
    for name in profile_names():
        assert load_profile(name).name == name


def test_what_cannot_be_launched_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"--draft; published: AQ-MedAI/Kimi-K25-eagle3"):
        recipe("kimi-k2.5", "evaluate")
    with pytest.raises(ConfigError, match="unknown role 'train'"):
        recipe("kimi-k2.5", "train")
    with pytest.raises(ConfigError, match=r"needs a drafter \(smollm2\): give its directory"):
        recipe("smollm2", "evaluate")


def test_the_embedded_target_is_launched_with_a_drafter_too() -> None:
    words = recipe("smollm2", "evaluate", draft="/d", extra=("--draft-steps", "2")).command
    assert words[-4:] == ("--drafter", "/d", "--draft-steps", "2")


def test_the_printed_line_is_the_command_of_a_shell() -> None:
    made = Recipe(("/a b/python", "-m", "x"), {"A": "1 2", "B": "3"}, 1)
    assert shlex.split(made.shell_line()) == ["env", "A=1 2", "B=3", "/a b/python", "-m", "x"]


def test_settings_that_did_not_arrive_are_named() -> None:
    wanted = {"DATAGEN_X": "1", "DATAGEN_Y": "2"}
    sleeper = subprocess.Popen(
        ["sleep", "60"], env={"PATH": os.environ["PATH"], "DATAGEN_X": "1", "DATAGEN_Y": "other"}
    )
    try:
        assert missing_settings(sleeper.pid, wanted) == {"DATAGEN_Y": "other"}
        with pytest.raises(ConfigError, match=r"DATAGEN_Y=2 \(there: other\)"):
            require_environment(sleeper.pid, Recipe((), wanted, 0))
        with pytest.raises(ConfigError, match="0 scheduler processes run on this host, 8 expected"):
            require_environment(sleeper.pid, Recipe((), wanted, 8))
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_that_is_still_starting_has_its_environment() -> None:
    for _ in range(200):  # the kernel shows one in fifty without, just after it was started
        with subprocess.Popen(["sleep", "60"], env={"DATAGEN_X": "1"}) as sleeper:
            found = process_environment(sleeper.pid)
            sleeper.kill()
        assert found == {"DATAGEN_X": "1"}


def test_a_process_that_the_kernel_takes_long_to_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, process = 0.0, tmp_path / "7"

    def shown(environment: str) -> None:
        end = 4096 if environment else 0
        process.joinpath("environ").write_text(environment)
        process.joinpath("stat").write_text(f"7 (a b) R {' '.join(['0'] * 47)} {end} 0\n")

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        shown("DATAGEN_X=1\0" if now > 3 else "")

    process.mkdir()
    shown("")
    monkeypatch.setattr("datagen.target.launch.PROC", tmp_path)
    monkeypatch.setattr(
        "datagen.target.launch.time", SimpleNamespace(sleep=sleep, monotonic=lambda: now)
    )
    assert process_environment(7) == {"DATAGEN_X": "1"}


def test_a_process_may_have_any_bytes_as_its_name(tmp_path: Path) -> None:
    """The kernel cuts names at 15 bytes, in the middle of a letter too."""
    program = os.fsencode(tmp_path) + b"/caf\xc3"
    os.symlink(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "60"], env={"DATAGEN_X": "1"}) as sleeper:
        assert process_environment(sleeper.pid) == {"DATAGEN_X": "1"}
        assert sleeper.pid in descendants(os.getpid())
        sleeper.kill()


def test_a_process_without_an_environment_is_told_apart_from_one_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    with subprocess.Popen(["sleep", "60"], env={}) as sleeper:
        process_environment(sleeper.pid)
        monkeypatch.setattr("datagen.target.launch.time.sleep", pauses.append)
        assert process_environment(sleeper.pid) == {}
        sleeper.kill()
    assert not pauses, "it is not read again"


def test_a_scheduler_that_lost_the_environment_is_found_among_the_servers_children() -> None:
    ranks = [f"bash -c 'exec -a {SCHEDULER}_TP{i} sleep 60' &" for i in range(2)]
    script = f"NCCL_X=1 {ranks[0]} {ranks[1]} wait"
    server = subprocess.Popen(
        ["bash", "-c", script], env={"PATH": os.environ["PATH"]}, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with pytest.raises(ConfigError) as caught:
                require_environment(server.pid, Recipe((), {"NCCL_X": "1"}, 2))
            if "did not reach" in str(caught.value):
                break
            assert time.monotonic() < deadline, caught.value
            time.sleep(0.05)
        assert "NCCL_X=1 (there: unset)" in str(caught.value)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.model
def test_launch_starts_the_server_proves_its_settings_and_ends_with_it(tmp_path: Path) -> None:
    port = free_port()
    spool = tmp_path / "spool"
    command = [
        sys.executable, "-m", "datagen.cli", "launch", "smollm2", "--role", "capture", "--port",
        str(port), "--spool-dir", str(spool), "--", "--threads", "1",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as launched:
        assert launched.stderr is not None
        try:
            ready = launched.stderr.readline()
            assert "DATAGEN_CAPTURE_DIR, DATAGEN_CAPTURE_BOUNDARIES reached process" in ready
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info") as answer:
                assert json.load(answer)["capture_dir"] == str(spool)
        finally:
            launched.terminate()
        assert launched.wait(60) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


def test_spool_gc_removes_what_is_old_and_says_so(tmp_path: Path) -> None:
    old, fresh = (tmp_path / (c * 32 + ".safetensors") for c in "ab")
    for path, age in ((old, 2000), (fresh, 10)):
        path.write_bytes(b"123")
        os.utime(path, (time.time() - age, time.time() - age))
    command = [sys.executable, "-m", "datagen.cli", "spool", "gc", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    assert done.stdout == "removed 1 files, 3 bytes\n"
    assert not old.exists()
    assert fresh.exists()
    absent = subprocess.run(
        [*command[:-1], str(tmp_path / "none")],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert absent.returncode == 1
    assert absent.stderr.startswith("datagen: error: the spool cannot be swept: No such file")
