"""Preflight against a real server process that is right, and against each way of being wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from datagen.cli.app import app
from datagen.collect.proof import preflight
from datagen.config import collect_config
from datagen.embedded.faults import FAULTS
from datagen.errors import ConfigError, PreflightRed
from datagen.store.manifest import Manifest
from datagen.target.checks.answers import check_parity
from datagen.target.checks.captured import check_batch
from datagen.target.checks.host import check_disk
from datagen.target.checks.probes import Answer, Attempt, Evidence, long_tokens
from datagen.target.checks.rendering import check_rendering
from datagen.target.checks.renderings import Rendered
from datagen.target.checks.served import check_version
from datagen.target.checks.subject import QUICK, Subject
from datagen.target.checks.suite import NAMES
from datagen.target.checks.verdict import Skipped, require_known
from datagen.target.client import SGLangClient
from datagen.target.failures import RowFailure
from datagen.target.preflight import context_of
from datagen.target.profile import Profile
from datagen.target.tokens import TemplateRenderer
from tests.target.faulty import faulty
from tests.tiny import (
    HIDDEN,
    write_tiny_checkpoint,
    write_tiny_mix,
    write_tiny_profile,
)  # fmt: skip

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{{ tools_ts_str if tools_ts_str is defined else "
    "tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}"
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
    "tokenize_differs": ("rendering", "'tools' differs from token", "--rendering ours"),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a thinking switch and tools in its template."""
    directory = write_tiny_checkpoint(tmp_path_factory.mktemp("preflight") / "tiny-llama")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return directory


def profile_of(checkpoint: Path, folder: Path, url: str, **changes: Any) -> Path:
    return write_tiny_profile(
        folder / "profile.yaml", checkpoint, url, **{"thinking_kwarg": "thinking", **changes}
    )


def found_by(
    checkpoint: Path, folder: Path, url: str, **settings: Any
) -> dict[str, dict[str, Any]]:
    """Every check's result by its name, from a preflight in this process."""
    config = collect_config(
        **{
            "target": str(profile_of(checkpoint, folder, url)), "tokenizer": str(checkpoint),
            "runs_dir": str(folder), "spool_mib": 64, **settings,
        }
    )  # fmt: skip
    places = asyncio.run(preflight(config, print, effort=QUICK, names=NAMES))
    return results({"places": [p.as_dict() for p in places]})


def results(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every check by its name."""
    return {r["name"]: r for place in report["places"] for r in place["results"]}


def of_status(found: dict[str, dict[str, Any]], status: str) -> dict[str, str]:
    return {name: r["measured"] for name, r in found.items() if r["status"] == status}


def command(*arguments: str) -> Result:
    """`datagen` with arguments, in this process: no interpreter to start."""
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)


def test_a_healthy_server_is_green_on_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    with faulty(checkpoint, tmp_path, "") as url:
        target = profile_of(checkpoint, tmp_path, url)
        common = ["--target", str(target), "--tokenizer", str(checkpoint), "--json"]
        done = command("preflight", *common, "--spool-mib", "64", "--runs-dir", str(tmp_path))
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        found = results(report)
        assert set(found) == set(NAMES)
        assert not of_status(found, "red")
        assert of_status(found, "skipped").keys() == {"disk"}
        assert not list((tmp_path / "spool").glob("*")), "no probe stays in the spool"
        assert report["places"][0]["speeds"]["generate_tokens_per_s"] > 0
        (tmp_path / "speeds.json").write_text(done.stdout)
    mix = write_tiny_mix(tmp_path, 3)
    planned = command("plan", str(mix), *common, "--speeds", str(tmp_path / "speeds.json"))
    assert json.loads(planned.stdout)["cost"]["hours"] > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_its_own_check_red_and_names_the_fix(
    checkpoint: Path, tmp_path: Path, fault: str
) -> None:
    name, measured, fix = CAUGHT[fault]
    with faulty(checkpoint, tmp_path, fault) as url:
        found = found_by(checkpoint, tmp_path, url)
    assert of_status(found, "red").keys() == {name}, of_status(found, "red")
    assert measured in found[name]["measured"]
    assert fix in found[name]["fix"]


def test_a_run_starts_past_a_red_check_only_by_its_name_and_says_so(
    checkpoint: Path, tmp_path: Path
) -> None:
    def collect(*more: str) -> Result:
        return command(
            "collect", "--run", str(tmp_path / "run"), "--target", str(target), "--mix", str(mix),
            "--tokenizer", str(checkpoint), *more,
        )  # fmt: skip

    mix = write_tiny_mix(tmp_path, 3)
    with faulty(checkpoint, tmp_path, "speculative") as url:
        target = profile_of(checkpoint, tmp_path, url)
        refused = collect()
        assert isinstance(refused.exception, PreflightRed)
        assert "[no-drafter] speculative decoding is on" in str(refused.exception)
        assert "--accept-risk no-drafter" in str(refused.exception)
        assert not (tmp_path / "run" / "plan.arrow").exists(), "nothing is asked or planned"
        done = collect("--accept-risk", "no-drafter")
        assert done.exit_code == 0, done.output
    kept = Manifest.load(tmp_path / "run" / "manifest.json").preflight
    assert kept["accepted_risks"] == ["no-drafter"]
    found = results(kept)
    assert found.keys() == set(NAMES)
    assert found["no-drafter"]["status"] == "red"
    assert found["disk"]["status"] == "ok"


def test_a_risk_that_no_check_bears_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no check is named 'luck'.*boundaries"):
        require_known(["luck"], NAMES)


def test_a_plan_larger_than_the_disk_is_red(tmp_path: Path) -> None:
    finding = check_disk(tmp_path / "not-yet" / "run", 1 << 60)
    assert finding.status == "red"
    assert "--limit" in str(finding.fix)
    assert check_disk(tmp_path, 1).status == "ok"


def test_states_as_json_are_checked_without_plugin_and_spool(
    checkpoint: Path, tmp_path: Path
) -> None:
    with faulty(checkpoint, tmp_path, "plugin_missing") as url:
        found = found_by(checkpoint, tmp_path, url, capture_mode="json")
    assert not of_status(found, "red")
    assert {"plugin", "spool", "clock"} <= of_status(found, "skipped").keys()
    for name in ("width", "rows", "boundaries", "alignment", "final-state", "batch"):
        assert found[name]["status"] == "ok", found[name]


def test_rendering_that_differs_from_the_servers_is_red(checkpoint: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    shutil.copytree(checkpoint, ours)
    path = ours / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": TEMPLATE.replace("tojson", "string")}))
    with faulty(checkpoint, tmp_path, "") as url:
        found = found_by(checkpoint, tmp_path, url, tokenizer=str(ours), rendering="ours")
    assert of_status(found, "red").keys() == {"rendering", "tokenizer"}
    assert "'tools' differs from token" in found["rendering"]["measured"]
    assert "--rendering server" in found["rendering"]["fix"]


def test_mistakes_in_a_profile_are_told_apart(checkpoint: Path, tmp_path: Path) -> None:
    with faulty(checkpoint, tmp_path, "") as url:
        wrong = tmp_path / "wrong"
        wrong.mkdir()
        target = profile_of(
            checkpoint, wrong, url,
            vocab_size=500, stop_token_ids=[7], thinking_kwarg="enable_thinking",
        )  # fmt: skip
        found = found_by(checkpoint, tmp_path, url, target=str(target))
    assert of_status(found, "red").keys() == {"dimensions", "stop-token", "thinking"}
    assert "vocab_size 512" in found["dimensions"]["measured"]
    assert "stop_token_ids" in found["stop-token"]["fix"]
    assert "thinking_kwarg" in found["thinking"]["fix"]


# -- verdicts on evidence that no fault of the embedded target gives ----------------------------


def subject_of(checkpoint: Path) -> Subject:
    profile = Profile.model_validate(
        json.loads(profile_of(checkpoint, checkpoint.parent, "http://127.0.0.1:9").read_text())
    )
    return Subject(
        SGLangClient("http://127.0.0.1:9"),
        profile,
        TemplateRenderer(checkpoint),
        checkpoint=checkpoint,
    )


def evidence(**info: Any) -> Evidence:
    return Evidence(info, {}, [5, 6, 7])


def spooled(ids: list[int], rows: np.ndarray[Any, Any]) -> Attempt:
    return Attempt(ids, bits=(rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize(
    ("info", "most"),
    [
        ({"context_length": 8192, "max_req_input_len": 8186}, 8185),
        ({"context_length": 8192, "max_req_input_len": 3000}, 2999),  # the KV cache is smaller
        ({"context_length": 8192}, 8191),
    ],
)
def test_the_long_prompt_is_one_that_the_server_takes(
    checkpoint: Path, info: dict[str, int], most: int
) -> None:
    """SGLang refuses a prompt of `max_req_input_len` tokens, whatever its context."""
    subject = subject_of(checkpoint)
    assert context_of(info, subject.profile) == most + 1
    assert long_tokens(subject, info | {"chunked_prefill_size": 8192}) <= most
    assert long_tokens(subject, info | {"chunked_prefill_size": 512}) == 576


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.5.16", "red"), ("0.5.17", "ok"), ("0.5.23.post1", "ok"), ("0.6.0", "red")],
)
def test_versions_beyond_the_tested_ones_are_red(
    checkpoint: Path, version: str, status: str
) -> None:
    assert check_version(subject_of(checkpoint), evidence(version=version)).status == status


def test_a_conversation_that_the_server_refuses_hides_no_difference_in_another(
    checkpoint: Path,
) -> None:
    subject = dataclasses.replace(subject_of(checkpoint), rendering="ours")
    refused = RowFailure("http_400", "System role not supported")
    found = evidence()
    found.rendered = {
        "one turn": Rendered([1, 2], [1, 2], [1, 2]),
        "several turns": Rendered([1], refused, refused),
    }
    with pytest.raises(Skipped, match="System role not supported"):
        check_rendering(subject, found)
    found.rendered["tools"] = Rendered([1, 2], [1, 3], [1, 3])
    finding = check_rendering(subject, found)
    assert finding.status == "red"
    assert "'tools' differs from token 1" in finding.measured


@pytest.mark.parametrize(("noise", "status"), [(0.005, "ok"), (0.5, "red")])
def test_states_that_depend_on_what_is_beside_them_are_red(
    checkpoint: Path, noise: float, status: str
) -> None:
    random, found = np.random.default_rng(0), evidence()
    rows = random.standard_normal((3, 4 * HIDDEN))
    found.captures["plain"] = spooled(found.plain_ids, rows)
    other = spooled([1, 2], random.standard_normal((2, 4 * HIDDEN)))
    again = spooled(found.plain_ids, rows + noise * random.standard_normal(rows.shape))
    found.batched = [other, again]
    finding = check_batch(subject_of(checkpoint), found)
    assert finding.status == status, finding
    assert finding.fix is None or "allreduce-fusion" in finding.fix


@pytest.mark.parametrize(("gap", "status"), [(0.1, "ok"), (1.5, "red")])
def test_another_answer_in_company_is_red_unless_it_was_a_tie(
    checkpoint: Path, gap: float, status: str
) -> None:
    found = evidence()
    top = [[(-0.1, 3), (-3.0, 4)], [(-0.5, 8), (-0.5 - gap, 9)]]
    found.alone = Answer([3, 8], {"type": "length"}, top)
    found.company = [Answer([3, 9], {"type": "length"}, top)]
    assert check_parity(subject_of(checkpoint), found).status == status
