"""The flow over a real Prefect server, a real flow process and a real target process."""

from __future__ import annotations

import inspect
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from datagen.config import collect_config
from datagen.store.run_status import run_status
from tests.collect.harness import Bench, rows_done, state_ids
from tests.flows.conftest import (
    PROMPTS,
    SLOW,
    Prefect,
    collected,
    eventually,
    manifest_of,
    settings,
)
from tests.tiny import free_port, serving

pytestmark = pytest.mark.prefect


@pytest.fixture(autouse=True)
def _services_run(prefect: Prefect) -> None:
    """A test that kills one leaves it to the next test to start it."""
    prefect.up()


@pytest.fixture(scope="module")
def finished(prefect: Prefect, bench: Bench) -> Path:
    """A run that a single `prefect deployment run datagen/collect --watch` collected."""
    run = bench.folder / "finished"
    done = prefect.deployment_run("--watch", **settings(bench, run))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("capture proven", "tok/s generated", "tok/s captured"):
        assert words in done.stdout, "log lines are streamed"
    return run


def test_a_deployment_run_collects_everything(bench: Bench, finished: Path) -> None:
    manifest = manifest_of(finished)
    assert manifest is not None
    assert manifest.prompts == PROMPTS + PROMPTS // 10
    assert manifest.samples.collected == manifest.samples.planned
    checked = bench.verify("finished")
    assert checked.returncode == 0, checked.stderr


def test_each_partition_is_one_task_run_named_by_its_index(
    prefect: Prefect, finished: Path
) -> None:
    flow_run = prefect.flow_runs(finished)[-1]
    n = run_status(finished).partitions
    assert n == 7, "six of train, one of heldout"
    expected = [(f"partition-{i:05d}", "COMPLETED") for i in range(n)]

    def recorded() -> bool:
        runs = prefect.task_runs(flow_run)
        return sorted((t["name"], t["state_type"]) for t in runs) == expected

    eventually(recorded)


def test_a_flow_run_is_named_by_its_run_and_mix(
    prefect: Prefect, bench: Bench, finished: Path
) -> None:
    flow_run = prefect.flow_runs(finished)[-1]
    assert str(finished) in flow_run["name"]
    assert str(bench.mix) in flow_run["name"]


def test_the_progress_artifact_ends_complete_and_says_everything(
    prefect: Prefect, finished: Path
) -> None:
    flow_run = prefect.flow_runs(finished)[-1]
    progress = prefect.artifacts(flow_run)["collect-progress"]
    assert progress["type"] == "progress"
    assert progress["data"] == 100
    for words in ("100.0 %", "7/7 partitions", "33/33 prompts", "tok/s", "of states"):
        assert words in progress["description"]


def test_the_table_and_the_summary_tell_what_the_manifest_holds(
    prefect: Prefect, finished: Path
) -> None:
    flow_run = prefect.flow_runs(finished)[-1]
    manifest = manifest_of(finished)
    assert manifest is not None
    artifacts = prefect.artifacts(flow_run)
    table = json.loads(artifacts["shards"]["data"])
    shards = [s for split in manifest.splits.values() for s in split.states]
    assert [(r["shard"], r["samples"], r["tokens"]) for r in table] == [
        (s.path, s.rows, s.tokens) for s in shards
    ]
    summary = artifacts["run-summary"]["data"]
    assert str(finished / "manifest.json") in summary
    assert f"| samples collected | {manifest.samples.collected:,} |" in summary
    assert manifest.fingerprint[:16] in summary


def test_a_written_manifest_is_an_event_that_names_it(prefect: Prefect, finished: Path) -> None:
    def written() -> list[dict[str, Any]]:
        name = {"event": {"name": ["datagen.manifest.written"]}}
        found = prefect.post("/events/filter", {"filter": name})["events"]
        path = str(finished / "manifest.json")
        return [e for e in found if e["payload"]["manifest"] == path]

    event = min(
        eventually(written), key=lambda e: str(e["occurred"])
    )  # later runs may say it again
    manifest = manifest_of(finished)
    assert manifest is not None
    assert event["payload"]["samples"] == manifest.samples.collected
    flow_run = prefect.flow_runs(finished)[-1]
    assert f"prefect.flow-run.{flow_run['id']}" in {
        r["prefect.resource.id"] for r in event["related"]
    }


def test_the_same_command_again_asks_the_target_nothing(
    prefect: Prefect, bench: Bench, finished: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.name != ".lock"}
    nobody = f"http://127.0.0.1:{free_port()}"
    again = prefect.collect(**settings(bench, finished, endpoints=nobody))
    assert again["state_type"] == "COMPLETED", again["state"]["message"]
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.name != ".lock"} == before
    assert not prefect.task_runs(again)


def test_other_settings_for_the_same_run_fail_with_one_line(
    prefect: Prefect, bench: Bench, finished: Path
) -> None:
    done = prefect.deployment_run("--watch", **settings(bench, finished, seed=7))
    assert done.returncode == 1
    assert "settings.seed is 7, was 0" in done.stdout
    assert "Traceback" not in done.stdout
    state = prefect.latest(finished)["state"]
    assert state["type"] == "FAILED"
    assert state["message"].startswith("the run holds rows made under other settings")


def test_an_unknown_mix_fails_with_one_line(prefect: Prefect, bench: Bench) -> None:
    run = bench.folder / "unknown-mix"
    state = prefect.collect(**settings(bench, run, mix="nosuch"))["state"]
    assert state["type"] == "FAILED"
    assert "nosuch" in state["message"]
    assert "\n" not in state["message"]


def test_a_target_that_dies_for_good_fails_the_run_with_one_line(
    prefect: Prefect, bench: Bench, tmp_path: Path
) -> None:
    run = bench.folder / "target-died"
    with serving(str(bench.checkpoint), tmp_path) as mortal:
        given = settings(bench, run, endpoints=mortal.url, patience_s=1, **SLOW)
        prefect.start(**given)
        eventually(lambda: rows_done(run) > 0)
        mortal.kill()
    eventually(lambda: prefect.latest(run)["state_type"] == "FAILED")
    flow_run = prefect.latest(run)
    assert mortal.url in flow_run["state"]["message"]
    assert "\n" not in flow_run["state"]["message"]
    assert rows_done(run) > 0
    logs = prefect.find("logs", logs={"flow_run_id": {"any_": [flow_run["id"]]}})
    assert not [entry["message"] for entry in logs if "Traceback" in entry["message"]]


def test_the_form_shows_every_setting_with_its_default_and_meaning(prefect: Prefect) -> None:
    deployment = prefect.get("/deployments/name/datagen/collect")
    fields = deployment["parameter_openapi_schema"]["properties"]
    wanted = inspect.signature(collect_config).parameters
    assert set(fields) == set(wanted) - {"api_key"}, "a secret does not belong in a form"
    for name, field in fields.items():
        assert field["description"], name
        assert field["type"] in ("string", "integer", "number"), "flat scalars"
        if name != "limit":  # a click in the UI must not start the whole mix
            assert field["default"] == wanted[name].default, name
    assert not deployment["parameter_openapi_schema"].get("required")
    assert deployment["global_concurrency_limit"]["limit"] == 1


def test_data_goes_on_while_the_prefect_server_is_dead(
    prefect: Prefect, bench: Bench, finished: Path
) -> None:
    run = bench.folder / "server-killed"
    prefect.start(**settings(bench, run, **SLOW))
    eventually(lambda: rows_done(run) > 0)
    os.kill(prefect.pid(prefect.server), signal.SIGKILL)
    assert manifest_of(run) is None, "killed in the middle"
    manifest = eventually(lambda: manifest_of(run), within_s=240)
    assert manifest.samples.collected == manifest.samples.planned
    prefect.up()
    assert bench.verify("server-killed").returncode == 0
    eventually(lambda: prefect.latest(run)["state_type"] == "COMPLETED", within_s=240)

    before = prefect.pid(prefect.flows)
    prefect.up()
    assert prefect.pid(prefect.flows) != before, "one that saw its server die cancels no run"


def test_cancelling_keeps_what_is_done_and_the_next_run_finishes_it(
    prefect: Prefect, bench: Bench, finished: Path
) -> None:
    run = bench.folder / "cancelled"
    given = settings(bench, run, **SLOW)
    prefect.start(**given)
    eventually(lambda: rows_done(run) > 0)
    flow_run = prefect.latest(run)
    prefect.cancel(flow_run)
    eventually(lambda: prefect.latest(run)["state_type"] == "CANCELLED")
    kept = collected(run)
    assert manifest_of(run) is None
    assert kept

    resumed = prefect.collect(**given)
    assert resumed["state_type"] == "COMPLETED", resumed["state"]["message"]
    assert kept < collected(run), "nothing was collected twice"
    after = list(state_ids(run))
    assert len(after) == len(dict(after)) == run_status(run).planned
    assert bench.verify("cancelled").returncode == 0
