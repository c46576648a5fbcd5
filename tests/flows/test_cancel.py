"""A cancelled evaluation leaves no server behind, not even one that ignores SIGTERM."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from datagen.finetune import finetune, finetune_config
from tests.drafter.run import tiny_target, write_run
from tests.flows.conftest import Prefect, eventually
from tests.tiny import write_tiny_profile

pytestmark = pytest.mark.prefect
KILLED_AT_S = 30  # by Prefect, when a cancelled flow does not end
STUBBORN = """#!/bin/sh
trap "" TERM
{python} "$@"
sleep 600
"""


def processes_of(folder: Path) -> list[str]:
    """Command lines that name `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def test_cancelling_an_evaluation_ends_the_servers_of_its_grid(
    prefect: Prefect, tmp_path: Path
) -> None:
    prefect.up()
    checkpoint = tiny_target(tmp_path)
    manifest = write_run(tmp_path / "run", checkpoint, train=12, heldout=4)
    content = json.loads(manifest.read_text())
    content["settings"]["max_new_tokens"] = 14
    manifest.write_text(json.dumps(content))
    training = finetune_config(
        manifest=str(manifest), target_weights=str(checkpoint), depths=2, max_steps=2,
        batch_tokens=128, heldout=2, draft_vocab=256, device="cpu", evaluate_every=100,
    )  # fmt: skip
    finetune(training, lambda _: None)
    profile = write_tiny_profile(
        tmp_path / "profile.yaml", checkpoint, "http://127.0.0.1:9", embedded=True
    )
    stubborn = tmp_path / "stubborn.sh"
    stubborn.write_text(STUBBORN.format(python=sys.executable))
    stubborn.chmod(0o755)
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        json.dumps(
            {
                "python": str(stubborn), "model_path": str(checkpoint),
                "settings": [{"name": "two", "steps": 2}],
            }
        )
    )  # fmt: skip
    deployment = prefect.get("/deployments/name/evaluate/heldout")
    given = {
        "manifest": str(manifest), "steps": 2, "device": "cpu", "target": str(profile),
        "target_weights": str(checkpoint), "grid": str(grid), "live_dtype": "float32",
        "rounds": 10_000, "name": "cancelled",
    }  # fmt: skip
    started = prefect.post(
        f"/deployments/{deployment['id']}/create_flow_run",
        {"parameters": given, "state": {"type": "SCHEDULED"}},
    )
    logs = manifest.parent / "evaluation" / "cancelled.logs"

    def serving() -> bool:
        seen = prefect.get(f"/flow_runs/{started['id']}")
        assert seen["state_type"] in ("SCHEDULED", "PENDING", "RUNNING"), seen["state"]["message"]
        found = [logs / f"{name}.log" for name in ("baseline", "two")]
        return all(log.exists() and "serving" in log.read_text() for log in found)

    eventually(serving, within_s=180)
    assert len(processes_of(tmp_path)) >= 4, "each server and what holds it"
    prefect.cancel(started)
    cancelled_at = time.monotonic()
    eventually(lambda: not processes_of(tmp_path), within_s=60)
    took = time.monotonic() - cancelled_at
    print(f"no server {took:.1f} s after the request")
    run = f"/flow_runs/{started['id']}"
    eventually(lambda: prefect.get(run)["state_type"] == "CANCELLED", within_s=60)
    assert took < KILLED_AT_S
