"""The deployment finetune/train against a real Prefect server."""

from __future__ import annotations

import asyncio
import base64
import inspect
from pathlib import Path
from typing import Any

import pytest
import typer

from datagen.cli.app import app
from datagen.drafter.checkpoint import load_drafter
from datagen.drafter.settings import RunConfig, TrainConfig
from datagen.finetune import finetune_config
from flows.finetune import finetune
from tests.drafter.run import tiny_target, write_run
from tests.flows.conftest import Prefect, eventually

pytestmark = pytest.mark.prefect


def run(prefect: Prefect, **parameters: Any) -> dict[str, Any]:
    """Start a flow run and wait for its end."""
    deployment = prefect.get("/deployments/name/finetune/train")
    started = prefect.post(
        f"/deployments/{deployment['id']}/create_flow_run",
        {"parameters": parameters, "state": {"type": "SCHEDULED"}},
    )

    def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = prefect.get(f"/flow_runs/{started['id']}")
        return found if found["state_type"] in ("COMPLETED", "FAILED", "CRASHED") else None

    return eventually(ended, within_s=180)


def test_a_manifest_becomes_a_drafter_with_its_curves_in_the_ui(
    prefect: Prefect, tmp_path: Path
) -> None:
    manifest = write_run(tmp_path / "run", tiny_target(tmp_path), train=8, heldout=2)
    given = {
        "manifest": str(manifest), "target_weights": str(tmp_path / "tiny-llama"), "depths": 2,
        "batch_tokens": 64, "max_steps": 4, "draft_vocab": 64, "log_every": 2, "device": "cpu",
    }  # fmt: skip
    done = run(prefect, **given)
    assert done["state_type"] == "COMPLETED", done["state"]["message"]
    final = tmp_path / "run" / "drafter" / "finetuned" / "final"
    assert len(load_drafter(final).vocab.target_ids_U) == 64
    shown = prefect.artifacts(done)["finetune"]["data"]
    assert "| predicted_accept_len |" in shown
    picture = shown.split("base64,")[1].split(")")[0]
    assert base64.b64decode(picture) == (final.parent / "curves.svg").read_bytes()

    # What the flow returns is its state: no second process is needed to see it.
    failed = asyncio.run(finetune.fn(**{**given, "learning_rate": 0.5}))
    assert failed.is_failed()
    assert "learning_rate is 0.5" in failed.message
    assert "\n" not in failed.message


def test_the_form_shows_every_setting_with_its_default_and_meaning(prefect: Prefect) -> None:
    deployment = prefect.get("/deployments/name/finetune/train")
    schema = deployment["parameter_openapi_schema"]
    hidden = {"beta1", "beta2", "floor", "ahead", "keep"}  # of no use in a form
    own = set(inspect.signature(finetune_config).parameters) - {"settings"}
    wanted = own | set(TrainConfig.model_fields) | set(RunConfig.model_fields)
    assert set(schema["properties"]) == wanted - hidden
    assert not schema.get("required")
    defaults = {**TrainConfig().model_dump(), **RunConfig().model_dump()}
    for name, field in schema["properties"].items():
        assert field["description"], name
        assert field["type"] in ("string", "integer", "number", "boolean")
        assert name not in defaults or field["default"] == defaults[name], name


def test_the_command_line_has_the_flows_settings() -> None:
    command = typer.main.get_command(app).commands["finetune"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    for name in set(inspect.signature(finetune.fn).parameters) - {"manifest"}:
        assert f"--{name.replace('_', '-')}" in options, name
