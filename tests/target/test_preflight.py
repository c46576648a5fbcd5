"""Preflight against a real server process that is right, and against each way of being wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datagen.embedded.faults import FAULTS, VARIABLE
from tests.tiny import serving, write_tiny_checkpoint, write_tiny_profile

CLI = [sys.executable, "-m", "datagen.cli"]
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if thinking is defined and not thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
# fault: the check that turns red, words of what it measured, words of what to change
CAUGHT = {
    "final_only": ("width", "64 values a token = the final state alone", "EAGLE instead of EAGLE3"),
    "shifted_rows": ("alignment", "shifted by +1", "capture plugin"),
    "wrong_norm": ("final-state", "before the final norm", "final_norm: pre"),
    "boundary_shift": ("boundaries", "layers [2, 4, 5]", "counts layers otherwise"),
    "radix_hidden_rows": ("rows", "repeated prompt", "--disable-radix-cache"),
    "chunk_lost_rows": ("rows", "long prompt", "--chunked-prefill-size -1"),
    "other_model": ("served-model", "Other-7B", "--target"),
    "speculative": ("no-drafter", "EAGLE", "--speculative-*"),
    "plugin_missing": ("plugin", "no meta_info.datagen", "pip install --no-deps datagen"),
    "plugin_other_version": ("plugin", "protocol 99", "install this version of datagen"),
    "spool_elsewhere": ("spool", "/another-host/spool", "both mount"),
    "disk_full": ("spool", "bytes free in the spool", "make room"),
    "thinking_ignored": ("thinking", "the server ignores thinking", "chat template"),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a thinking switch and tools in its template."""
    directory = write_tiny_checkpoint(tmp_path_factory.mktemp("preflight") / "tiny-llama")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return directory


def asked(
    checkpoint: Path, folder: Path, url: str, *more: str, **profile: Any
) -> tuple[int, dict[str, Any], str]:
    """Exit status, what --json says, and stderr of `datagen preflight`."""
    changes = {"thinking_kwarg": "thinking", **profile}
    target = write_tiny_profile(folder / "profile.yaml", checkpoint, url, **changes)
    done = subprocess.run(
        [*CLI, "preflight", "--target", str(target), "--tokenizer", str(checkpoint), "--json",
         "--spool-mib", "64", "--runs-dir", str(folder), *more],
        capture_output=True, text=True, timeout=120, check=False,
        env={k: v for k, v in os.environ.items() if k != VARIABLE},
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def results(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every check by its name."""
    return {r["name"]: r for place in report["places"] for r in place["results"]}


def test_a_healthy_server_is_green(checkpoint: Path, tmp_path: Path) -> None:
    with serving(str(checkpoint), tmp_path, dtype="bfloat16") as process:
        code, report, said = asked(checkpoint, tmp_path, process.url)
        assert code == 0, (said, report)
        found = results(report)
        assert {n for n, r in found.items() if r["status"] == "red"} == set()
        assert {n for n, r in found.items() if r["status"] == "skipped"} == {"disk"}
        assert not list((tmp_path / "spool").glob("*")), "no probe stays in the spool"
        assert report["places"][0]["speeds"]["generate_tokens_per_s"] > 0
        assert report["places"][0]["seconds"] < 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_its_own_check_red_and_names_the_fix(
    checkpoint: Path, tmp_path: Path, fault: str
) -> None:
    name, measured, fix = CAUGHT[fault]
    with serving(str(checkpoint), tmp_path, dtype="bfloat16", fault=fault) as process:
        code, report, said = asked(checkpoint, tmp_path, process.url, "--quick")
    assert code == 1, said
    found = results(report)
    assert {n: r["measured"] for n, r in found.items() if r["status"] == "red"}.keys() == {name}, {
        n: r for n, r in found.items() if r["status"] == "red"
    }
    assert measured in found[name]["measured"]
    assert fix in found[name]["fix"]
