"""What the Prefect server does by itself: mark dead runs crashed, and, when switched on, chain the steps.

The chain is shipped disabled: switch it on under Automations in the UI, or with
`prefect automation resume "datagen: fine-tune what was collected"`. `pipeline/full` chains the steps
itself, so do not use both. What else a run needs (of another target than the embedded one its
`target_weights`, and `init`) is added to the parameters of the automation's action, and stays there.

    datagen.manifest.written   emitted by a finished collect    -> finetune/train of that manifest
    datagen.drafter.written    emitted by a finished fine-tune  -> evaluate/heldout, which writes the report
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.events.actions import ActionTypesOrUnknown, ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

SILENT_AFTER = timedelta(seconds=120)
CRASH_SILENT = "datagen: crash silent runs"
TRAIN, EVALUATE = "datagen: fine-tune what was collected", "datagen: evaluate what was fine-tuned"
MANIFEST_WRITTEN, DRAFTER_WRITTEN = "datagen.manifest.written", "datagen.drafter.written"


async def register(train: UUID, evaluate: UUID) -> None:
    """Create what is missing; what is there keeps its switch and the parameters that a user added to its

    action, and gets the deployments' present ids.
    """
    await _ensure(_crash_silent_runs())
    await _ensure(_chain(TRAIN, MANIFEST_WRITTEN, train, ("manifest",)))
    await _ensure(_chain(EVALUATE, DRAFTER_WRITTEN, evaluate, ("manifest", "drafter")))


async def emit_drafter_written(manifest: Path, drafter: Path) -> None:
    """Say that a fine-tune is done."""

    def emit() -> None:
        where = {"manifest": str(manifest.resolve()), "drafter": str(drafter.resolve())}
        resource = {"prefect.resource.id": f"datagen.drafter.{where['drafter']}"}
        emit_event(DRAFTER_WRITTEN, resource=resource, payload=where)

    await asyncio.to_thread(emit)


async def _ensure(wanted: Automation) -> None:
    try:
        there = await Automation.aread(name=wanted.name)
    except ValueError:
        await wanted.acreate()
        return
    actions = with_parameters_of(there, wanted)
    if there.actions != actions:
        there.actions = actions
        await there.aupdate()


def with_parameters_of(there: Automation, wanted: Automation) -> list[ActionTypesOrUnknown]:
    """The wanted actions; runs of deployments with the parameters that those there have besides."""
    found = []
    for number, action in enumerate(wanted.actions):
        old = there.actions[number] if number < len(there.actions) else None
        if isinstance(action, RunDeployment) and isinstance(old, RunDeployment):
            parameters = {**(old.parameters or {}), **(action.parameters or {})}
            kept = {"parameters": parameters, "job_variables": old.job_variables}
            action = action.model_copy(update=kept)
        found.append(action)
    return found


def _crash_silent_runs() -> Automation:
    """Runs that send no heartbeat: their machine lost power.

    Without it such a run keeps its deployment's only slot for ever.
    """
    return Automation(
        name=CRASH_SILENT,
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENT_AFTER,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name=None,
                message="no heartbeat: run it again to go on",
                force=False,
            )
        ],
    )


def _chain(name: str, event: str, deployment: UUID, payload: tuple[str, ...]) -> Automation:
    """Disabled: a run of `deployment` for every `event`, its parameters those fields of the payload."""
    parameters: dict[str, Any] = {
        key: {"__prefect_kind": "jinja", "template": "{{ event.payload." + key + " }}"}
        for key in payload
    }
    return Automation(
        name=name,
        description=f"On {event}. Not together with pipeline/full, which chains the steps itself.",
        enabled=False,
        trigger=EventTrigger(
            expect={event},
            match=ResourceSpecification({"prefect.resource.id": ["datagen.*"]}),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment,
                parameters=parameters,
                job_variables=None,
            )
        ],
    )
