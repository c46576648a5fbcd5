"""Flow `finetune`, deployment `probe`: short training on nested subsets, and what the full run can reach."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Failed
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from datagen.errors import ConfigError, DatagenError
from datagen.evaluate.probe import probe as probe_job
from datagen.finetune import finetune_config
from datagen.prompts.estimate import Speed
from flows.logs import flow_logger


@flow(name="finetune", flow_run_name="probe-{manifest}", retries=0, persist_result=False)
async def probe(
    baseline: PositiveFloat = 82.0,
    cycle_ms: PositiveFloat = 30.0,
    manifest: str = "runs/demo/manifest.json",
    out: str = "",
    init: str = "",
    target_weights: str = "",
    steps: PositiveInt = 3,
    fractions: str = "0.0625,0.125,0.25",
    limit: NonNegativeInt = 0,
    epochs: PositiveInt = 1,
    max_steps: NonNegativeInt = 0,
    depths: PositiveInt = 5,
    optimizer: str = "adamw",
    learning_rate: PositiveFloat = 1e-4,
    batch_tokens: PositiveInt = 4096,
    draft_vocab: NonNegativeInt = 0,
    device: str = "auto",
    generate_tps: NonNegativeFloat = 0.0,
    prefill_tps: NonNegativeFloat = 0.0,
    gpus: PositiveInt = 8,
    servers: PositiveInt = 1,
) -> dict[str, Any] | State[Any]:
    """Score the init drafter, train short on nested subsets, and say whether the full run can pay.

    Args:
        baseline: Tokens/s of one request without a drafter.
        cycle_ms: Milliseconds of one verify cycle.
        manifest: manifest.json of a finished run, or its directory.
        out: Where the subsets' drafters go; empty is drafter/probe in the run.
        init: A drafter's checkpoint to start from; empty is a fresh one.
        target_weights: The target's checkpoint directory; empty is the embedded target's.
        steps: Draft tokens per verify cycle.
        fractions: Of the training samples, three at least, with commas.
        limit: Samples of the full run that is asked about; 0 is all.
        epochs: Passes over a subset.
        max_steps: Steps on a subset; 0 is as many as the epochs have.
        depths: Unrolled drafts; at least as many as will be served.
        optimizer: adamw, or muon for the matrices but lm_head.
        learning_rate: At the end of the warm-up.
        batch_tokens: Tokens packed into a micro-batch.
        draft_vocab: Size of a new vocabulary map; 0 is 32,000.
        device: auto, cpu or cuda.
        generate_tps: Tokens/s that a server generates, for the cost; 0 is this run's own pace.
        prefill_tps: Tokens/s that a server captures.
        gpus: GPUs of a server.
        servers: Servers that would collect.
    """
    log = flow_logger()
    stopping = threading.Event()
    try:
        if bool(generate_tps) != bool(prefill_tps):
            raise ConfigError("one speed alone gives no hours", fix="give both, or neither")
        config = finetune_config(
            manifest=manifest, out=out, init=init, target_weights=target_weights, limit=limit,
            epochs=epochs, max_steps=max_steps, depths=depths, optimizer=optimizer,
            learning_rate=learning_rate, batch_tokens=batch_tokens, draft_vocab=draft_vocab,
            device=device,
        )  # fmt: skip
        if not out:
            config = config.model_copy(update={"out": config.out.parent / "probe"})
        job = asyncio.create_task(
            asyncio.to_thread(
                probe_job, config, steps=steps, baseline=baseline, cycle_ms=cycle_ms,
                notify=log.info, fractions=_fractions(fractions), stop=stopping.is_set,
                device=device, target_weights=target_weights,
                speed=Speed(generate_tps, prefill_tps, gpus, servers) if generate_tps else None,
            )
        )  # fmt: skip
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            stopping.set()  # the step in progress ends, its checkpoint is written
            await asyncio.gather(job, return_exceptions=True)
            raise
    except DatagenError as e:
        log.error("%s", e)
        return Failed(message=str(e))  # raised, it would be a page of traceback


def _fractions(text: str) -> list[float]:
    try:
        return [float(f) for f in text.split(",") if f.strip()]
    except ValueError as e:
        raise ConfigError(f"fractions '{text}': {e}", fix="write 0.0625,0.125,0.25") from e
