"""The deployments pipeline/full and evaluate/heldout against a real Prefect server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from flows.automations import CRASH_SILENT, EVALUATE, TRAIN, emit_drafter_written, register
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

    def seen() -> dict[str, Any] | None:
        found: dict[str, Any] = prefect.get(f"/flow_runs/{started['id']}")
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

    again = ended(prefect, "evaluate/heldout", manifest=str(run / "nothing.json"))
    assert again["state_type"] == "FAILED"
    assert "no manifest" in again["state"]["message"]


def test_the_chain_of_steps_is_shipped_switched_off_and_runs_when_switched_on(
    prefect: Prefect,
) -> None:
    prefect.up()
    chain = {a["name"]: a for a in prefect.find("automations")}
    assert [chain[n]["enabled"] for n in (CRASH_SILENT, TRAIN, EVALUATE)] == [True, False, False]
    path = f"{prefect.server.address}/automations/{chain[EVALUATE]['id']}"
    httpx.patch(path, json={"enabled": True}, timeout=30).raise_for_status()
    try:
        ids = [prefect.get(f"/deployments/name/{n}")["id"]
               for n in ("finetune/train", "evaluate/heldout")]  # fmt: skip
        asyncio.run(register(*map(UUID, ids)))  # as the next `make up` does
        assert prefect.get(f"/automations/{chain[EVALUATE]['id']}")["enabled"], "the user's switch"
        asyncio.run(emit_drafter_written(Path("/nowhere/manifest.json"), Path("/nowhere/final")))

        def triggered() -> list[dict[str, Any]]:
            runs = prefect.find("flow_runs", deployments={"name": {"any_": ["heldout"]}})
            return [r for r in runs if r["parameters"].get("drafter") == "/nowhere/final"]

        (run,) = eventually(triggered)
        assert run["parameters"]["manifest"] == "/nowhere/manifest.json"
    finally:
        httpx.patch(path, json={"enabled": False}, timeout=30).raise_for_status()


def test_a_step_that_fails_ends_the_pipeline_with_its_own_line(
    prefect: Prefect, bench: Bench, tmp_path: Path
) -> None:
    prefect.up()
    failed = ended(prefect, "pipeline/full", run=str(tmp_path / "run"), mix="no-such-mix")
    assert failed["state_type"] == "FAILED"
    assert failed["state"]["message"].startswith("collect: ")
    assert "no-such-mix" in failed["state"]["message"]
    assert "\n" not in failed["state"]["message"]
