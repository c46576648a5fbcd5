"""Flow `evaluate`, deployment `heldout`: accept_len on held-out prompts, the verdict, the report."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Failed
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from datagen.errors import DatagenError
from datagen.evaluate import evaluate as evaluate_job
from datagen.evaluate import evaluate_config
from datagen.evaluate.config import EvaluateConfig
from datagen.report.render import write_report
from flows.logs import flow_logger
from flows.progress import UI_TIMEOUT_S


@flow(name="evaluate", flow_run_name="{manifest}", retries=0, persist_result=False)
async def evaluate(
    manifest: str = "runs/demo/manifest.json",
    drafter: str = "",
    against: str = "",
    name: str = "",
    steps: PositiveInt = 3,
    split: str = "heldout",
    limit: NonNegativeInt = 0,
    device: str = "auto",
    dtype: str = "float32",
    target: str = "",
    target_weights: str = "",
    live: str = "",
    baseline_url: str = "",
    grid: str = "",
    live_dtype: str = "bfloat16",
    concurrencies: str = "1",
    rounds: PositiveInt = 2,
    live_prompts: PositiveInt = 50,
    baseline: NonNegativeFloat = 0.0,
    cycle_ms: NonNegativeFloat = 0.0,
    targets: str = "",
) -> dict[str, Any] | State[Any]:
    """A manifest and a drafter in, accept_len with its interval and a verdict out.

    Args:
        manifest: manifest.json of a finished run, or its directory.
        drafter: A checkpoint; empty is drafter/finetuned in the run.
        against: Another drafter, compared on the same samples.
        name: Of evaluation/NAME.json; empty is the drafter's.
        steps: Draft tokens per verify cycle.
        split: Which samples.
        limit: Samples, a nested subset; 0 is all.
        device: auto, cpu or cuda.
        dtype: float32, or bfloat16 as an engine computes.
        target: The target's profile; empty is the run's.
        target_weights: The target's checkpoint directory; empty is the embedded target's.
        live: URL of a server with the drafter; embedded starts both; empty measures by replay alone.
        baseline_url: URL of the same server without the drafter.
        grid: Servers to start and measure, a .yaml or draft steps as 1,2,3; empty is none.
        live_dtype: Of embedded servers, bfloat16 or float32.
        concurrencies: Of the live sitting, with commas.
        rounds: Passes per server and concurrency.
        live_prompts: Prompts of the live sitting.
        baseline: Known tokens/s without a drafter; 0 is unknown.
        cycle_ms: Known time of a verify cycle; 0 is unknown.
        targets: Tokens/s wished for, with commas.
    """
    given = dict(locals())
    log = flow_logger()
    try:
        config = evaluate_config(**given)
        result = await _stoppable(config, log.info)
        root = config.manifest.parent
        html, markdown = await asyncio.to_thread(write_report, root)
    except DatagenError as e:
        log.error("%s", e)
        return Failed(message=str(e))  # raised, it would be a page of traceback
    verdict = result["verdict"]
    log.info("%s %s", verdict["sentence"], verdict["next_step"])
    await _show(markdown, html)
    return {
        "verdict": verdict["answer"],
        "sentence": verdict["sentence"],
        "accept_len": result["replay"]["accept_len"]["value"],
        "report": str(html),
    }


async def _stoppable(config: EvaluateConfig, notify: Callable[[str], None]) -> dict[str, Any]:
    """The job in a thread; a cancelled flow ends the servers that it started before it ends."""
    stopping = threading.Event()
    job = asyncio.create_task(asyncio.to_thread(evaluate_job, config, notify, stopping.is_set))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        stopping.set()
        await asyncio.gather(job, return_exceptions=True)
        raise


async def _show(markdown: Path, html: Path) -> None:
    """The run card in the UI, which may fail: the report is on disk."""
    try:
        text = await asyncio.to_thread(markdown.read_text, "utf-8")
        call = acreate_markdown_artifact(key="run-card", markdown=text, description=str(html))
        await asyncio.wait_for(call, UI_TIMEOUT_S)
    except Exception as e:  # noqa: BLE001 - whatever the UI throws, the report is written
        flow_logger().warning("the Prefect UI is not updated (the report is written): %r", e)
