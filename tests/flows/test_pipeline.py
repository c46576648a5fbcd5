"""The deployments pipeline/full and evaluate/heldout against a real Prefect server."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.automations import (
    CRASH_SILENT,
    DRAFTER_WRITTEN,
    EVALUATE,
    MANIFEST_WRITTEN,
    TRAIN,
    register,
)
from tests.collect.harness import Bench
from tests.flows.conftest import Prefect, eventually

pytestmark = pytest.mark.prefect


def ended(prefect: Prefect, name: str, within_s: float = 240, **parameters: Any) -> dict[str, Any]:
    """Start a flow run of a deployment and wait for its end."""
    deployment = prefect.get(f"/deployments/name/{name}")
    started = prefect.post(
        f"/deployments/{deployment['id']}/create_flow_run",
        {"parameters": parameters, "state": {"type": "SCHEDULED"}},
    )
    return finished(prefect, started["id"], within_s)


def finished(prefect: Prefect, run_id: str, within_s: float = 240) -> dict[str, Any]:
    """A flow run, once it has ended."""

    def seen() -> dict[str, Any] | None:
        found: dict[str, Any] = prefect.get(f"/flow_runs/{run_id}")
        return found if found["state_type"] in ("COMPLETED", "FAILED", "CRASHED") else None

    return eventually(seen, within_s=within_s)


def test_prompts_become_a_verdict_in_one_run(prefect: Prefect, bench: Bench) -> None:
    prefect.up()
    run = bench.folder / "whole"
    given = {
        "run": str(run), "mix": str(bench.mix), "target": str(bench.profile), "limit": 12,
        "target_weights": str(bench.checkpoint), "max_steps": 4, "depths": 2, "batch_tokens": 128,
        "draft_vocab": 256, "steps": 2, "baseline": 20.0, "cycle_ms": 25.0,
    }  # fmt: skip
    done = ended(prefect, "pipeline/full", **given)
    assert done["state_type"] == "COMPLETED", done["state"]["message"]
    result = json.loads((run / "evaluation" / "finetuned.json").read_text())
    assert result["verdict"]["answer"] == "pays", "half a token a cycle is enough"
    assert "This drafter pays" in (run / "report.html").read_text()
    parts = prefect.find("flow_runs", flow_runs={"parent_flow_run_id": {"any_": [done["id"]]}})
    assert {p["state_type"] for p in parts} == {"COMPLETED"}
    assert len(parts) == 3
    shown = [prefect.artifacts(p) for p in parts]
    assert any("This drafter pays" in a["run-card"]["data"] for a in shown if "run-card" in a)

    said = eventually(lambda: events(prefect, DRAFTER_WRITTEN, run))
    assert [Path(e["payload"]["drafter"]).name for e in said] == ["final"]
    assert events(prefect, MANIFEST_WRITTEN, run)


def events(prefect: Prefect, name: str, run: Path) -> list[dict[str, Any]]:
    """Events of a name that name the manifest of `run`."""
    found = prefect.post("/events/filter", {"filter": {"event": {"name": [name]}}})
    manifest = str(run / "manifest.json")
    return [e for e in found["events"] if e["payload"].get("manifest") == manifest]


def switch(path: str, enabled: bool) -> None:
    """What the UI's switch sends; again while SQLite is locked, as Prefect's own client does."""

    def answered() -> httpx.Response | None:
        answer = httpx.patch(path, json={"enabled": enabled}, timeout=30)
        return None if answer.status_code == 503 else answer

    eventually(answered).raise_for_status()


def test_the_chain_of_steps_is_shipped_switched_off_and_runs_when_switched_on(
    prefect: Prefect,
) -> None:
    prefect.up()
    chain = {a["name"]: a for a in prefect.find("automations")}
    assert [chain[n]["enabled"] for n in (CRASH_SILENT, TRAIN, EVALUATE)] == [True, False, False]
    path = f"{prefect.server.address}/automations/{chain[EVALUATE]['id']}"
    switch(path, True)
    try:
        ids = [prefect.get(f"/deployments/name/{n}")["id"]
               for n in ("finetune/train", "evaluate/heldout")]  # fmt: skip
        with temporary_settings({PREFECT_API_URL: prefect.server.address}):
            asyncio.run(register(*map(UUID, ids)))  # as the next `make up` does
        assert prefect.get(f"/automations/{chain[EVALUATE]['id']}")["enabled"], "the user's switch"
        written = {
            "event": DRAFTER_WRITTEN, "resource": {"prefect.resource.id": "datagen.drafter.x"},
            "payload": {"manifest": "/nowhere/manifest.json", "drafter": "/nowhere/final"},
            "occurred": datetime.now(UTC).isoformat(), "id": str(uuid4()),
        }  # fmt: skip
        httpx.post(f"{prefect.server.address}/events", json=[written]).raise_for_status()

        def triggered() -> list[dict[str, Any]]:
            runs = prefect.find("flow_runs", deployments={"name": {"any_": ["heldout"]}})
            return [r for r in runs if r["parameters"].get("drafter") == "/nowhere/final"]

        (run,) = eventually(triggered)
        assert run["parameters"]["manifest"] == "/nowhere/manifest.json"
        failed = finished(prefect, run["id"])
        assert failed["state_type"] == "FAILED"
        assert "no manifest" in failed["state"]["message"]
    finally:
        switch(path, False)


def test_a_step_that_fails_ends_the_pipeline_with_its_own_line(
    prefect: Prefect, bench: Bench, tmp_path: Path
) -> None:
    prefect.up()
    failed = ended(prefect, "pipeline/full", run=str(tmp_path / "run"), mix="no-such-mix")
    assert failed["state_type"] == "FAILED"
    assert failed["state"]["message"].startswith("collect: ")
    assert "no-such-mix" in failed["state"]["message"]
    assert "\n" not in failed["state"]["message"]
