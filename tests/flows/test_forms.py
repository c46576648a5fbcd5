"""Forms hold what the commands take, and hand it on; automations keep what they were given."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any
from uuid import uuid4

import pytest
import typer
from prefect.events.actions import RunDeployment

from datagen.cli.app import app
from datagen.drafter.settings import TrainConfig
from datagen.prompts.estimate import Speed
from flows.automations import DRAFTER_WRITTEN, EVALUATE, _chain, with_parameters_of
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.pipeline import pipeline
from flows.probe import probe


def test_the_evaluate_form_has_the_commands_settings() -> None:
    command = typer.main.get_command(app).commands["evaluate"]  # type: ignore[attr-defined]
    given = {parameter.name: parameter.default for parameter in command.params}
    form = inspect.signature(evaluate.fn).parameters
    assert set(form) == given.keys() - {"as_json"}
    for name in set(form) - {"manifest"}:  # the command has no default run
        assert form[name].default == given[name], name


def test_a_probe_is_priced_on_the_servers_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def job(_config: Any, **settings: Any) -> dict[str, Any]:
        seen.update(settings)
        return {}

    monkeypatch.setattr("flows.probe.probe_job", job)
    speeds = {"generate_tps": 500.0, "prefill_tps": 9000.0, "gpus": 2, "servers": 3}
    asyncio.run(probe.fn(**speeds))
    assert seen["speed"] == Speed(500.0, 9000.0, gpus_per_server=2, servers=3)


def test_the_shorter_forms_hold_the_finetune_forms_settings_and_hand_them_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = inspect.signature(finetune.fn).parameters
    trained = set(TrainConfig.model_fields) & set(whole)
    for form in (pipeline.fn, probe.fn):
        found = inspect.signature(form).parameters
        assert {"optimizer", "learning_rate", "epochs"} < set(found)
        for name in trained & set(found) - {"limit"}:  # of a pipeline and a probe: of the whole run
            assert found[name].default == whole[name].default, name
    seen: list[Any] = []

    def job(config: Any, **_: Any) -> dict[str, Any]:
        seen.append(config.train.optimizer)
        return {}

    async def step(_flow: Any, name: str, **given: Any) -> dict[str, Any]:
        seen.extend([given["optimizer"]] if name == "finetune" else [])
        return {"manifest": "m", "drafter": "d", "sentence": "", "report": ""}

    monkeypatch.setattr("flows.probe.probe_job", job)
    monkeypatch.setattr("flows.pipeline._step", step)
    asyncio.run(probe.fn(optimizer="muon"))
    asyncio.run(pipeline.fn(optimizer="muon"))
    assert seen == ["muon", "muon"]


def test_an_automation_keeps_the_parameters_that_a_user_added() -> None:
    """As `target_weights`, without which no other target than the embedded one can be evaluated."""
    old, new = (_chain(EVALUATE, DRAFTER_WRITTEN, uuid4(), ("manifest", "drafter")) for _ in "ab")
    (there,) = old.actions
    assert isinstance(there, RunDeployment)
    assert there.parameters is not None
    there.parameters |= {"target_weights": "/models/k25", "manifest": "another"}
    (action,) = with_parameters_of(old, new)
    assert isinstance(action, RunDeployment)
    (wanted,) = new.actions
    assert isinstance(wanted, RunDeployment)
    assert action.deployment_id == wanted.deployment_id != there.deployment_id
    assert action.parameters == {**(wanted.parameters or {}), "target_weights": "/models/k25"}
