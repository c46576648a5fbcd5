"""Flow `pipeline`, deployment `full`: collect, fine-tune, evaluate, report; each step resumes itself."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Failed
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from flows.collect import datagen
from flows.evaluate import evaluate
from flows.finetune import finetune
from flows.logs import flow_logger


@flow(name="pipeline", flow_run_name="{run}-{mix}-{target}", retries=0, persist_result=False)
async def pipeline(
    run: str = "demo",
    mix: str = "demo",
    target: str = "smollm2",
    endpoints: str = "",
    limit: NonNegativeInt = 200,
    runs_dir: str = "runs",
    init: str = "",
    target_weights: str = "",
    epochs: PositiveInt = 1,
    max_steps: NonNegativeInt = 0,
    depths: PositiveInt = 5,
    batch_tokens: PositiveInt = 4096,
    optimizer: str = "adamw",
    learning_rate: PositiveFloat = 1e-4,
    draft_vocab: NonNegativeInt = 0,
    steps: PositiveInt = 3,
    live: str = "",
    baseline_url: str = "",
    live_prompts: PositiveInt = 50,
    baseline: NonNegativeFloat = 0.0,
    cycle_ms: NonNegativeFloat = 0.0,
) -> dict[str, Any] | State[Any]:
    """Prompts in, the answer out: does a drafter pay?

    Args:
        run: A name under runs_dir, or a path.
        mix: A mix by name, or the path of its .yaml.
        target: A target profile by name, or the path of its .yaml.
        endpoints: Server URLs, comma separated; empty is the profile's.
        limit: Prompts to take; 0 is the whole mix.
        runs_dir: Where runs named without a path live.
        init: A drafter's checkpoint to start from; empty is a fresh one.
        target_weights: The target's checkpoint directory; empty is the embedded target's.
        epochs: Passes over the samples.
        max_steps: Training steps; 0 is as many as the epochs have.
        depths: Unrolled drafts in training; at least `steps`.
        batch_tokens: Tokens packed into a micro-batch.
        optimizer: adamw, or muon for the matrices but lm_head.
        learning_rate: At the end of the warm-up.
        draft_vocab: Size of a new vocabulary map; 0 is 32,000.
        steps: Draft tokens per verify cycle.
        live: URL of a server with the drafter; embedded starts both; empty is replay alone.
        baseline_url: URL of the same server without the drafter.
        live_prompts: Prompts of the live sitting.
        baseline: Known tokens/s without a drafter; 0 is unknown.
        cycle_ms: Known time of a verify cycle; 0 is unknown.
    """
    try:
        collected = await _step(
            datagen, "collect", run=run, mix=mix, target=target, endpoints=endpoints, limit=limit,
            runs_dir=runs_dir,
        )  # fmt: skip
        trained = await _step(
            finetune, "finetune", manifest=collected["manifest"], init=init,
            target_weights=target_weights, epochs=epochs, max_steps=max_steps, depths=depths,
            batch_tokens=batch_tokens, optimizer=optimizer, learning_rate=learning_rate,
            draft_vocab=draft_vocab,
        )  # fmt: skip
        judged = await _step(
            evaluate, "evaluate", manifest=collected["manifest"], drafter=trained["drafter"],
            steps=steps, target_weights=target_weights, live=live, baseline_url=baseline_url,
            live_prompts=live_prompts, baseline=baseline, cycle_ms=cycle_ms,
        )  # fmt: skip
    except StepFailed as e:
        return Failed(message=str(e))
    flow_logger().info("%s Report: %s", judged["sentence"], judged["report"])
    return judged


class StepFailed(Exception):
    """A step of the pipeline ended without its result; the text is the step's own line."""


async def _step(step: Any, name: str, **parameters: Any) -> dict[str, Any]:
    """Run one flow as a subflow. Raises StepFailed."""
    state: State[dict[str, Any]] = await step(**parameters, return_state=True)
    if not state.is_completed():
        raise StepFailed(f"{name}: {state.message}")
    return await state.aresult()
