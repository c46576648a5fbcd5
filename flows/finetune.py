"""Flow `finetune`, deployment `train`: the fine-tune job, its progress and its curves."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Failed
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from datagen.errors import DatagenError
from datagen.finetune import finetune as finetune_job
from datagen.finetune import finetune_config
from flows.automations import emit_drafter_written
from flows.logs import flow_logger
from flows.progress import UI_TIMEOUT_S


@flow(name="finetune", flow_run_name="{manifest}", retries=0, persist_result=False)
async def finetune(
    manifest: str = "runs/demo/manifest.json",
    out: str = "",
    init: str = "",
    target_weights: str = "",
    heldout_manifest: str = "",
    weights: str = "",
    limit: NonNegativeInt = 0,
    heldout: PositiveInt = 64,
    epochs: PositiveInt = 1,
    max_steps: NonNegativeInt = 0,
    depths: PositiveInt = 5,
    loss: str = "kl",
    decay: PositiveFloat = 0.8,
    normalise: str = "positions",
    drop_outside: bool = True,
    optimizer: str = "adamw",
    learning_rate: PositiveFloat = 1e-4,
    warmup: NonNegativeFloat = 0.02,
    weight_decay: NonNegativeFloat = 0.0,
    clip: PositiveFloat = 0.5,
    ema: NonNegativeFloat = 0.0,
    batch_tokens: PositiveInt = 4096,
    max_tokens: NonNegativeInt = 0,
    accumulate: PositiveInt = 1,
    seed: NonNegativeInt = 0,
    fresh_vocab: bool = False,
    draft_vocab: NonNegativeInt = 0,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    compile: bool = True,  # noqa: A002
    graphs: bool = True,
    recompute: bool = False,
    threads: PositiveInt = 4,
    checkpoint_every: PositiveInt = 200,
    evaluate_every: PositiveInt = 200,
    log_every: PositiveInt = 10,
    export_dtype: str = "bfloat16",
    allow_chance: bool = False,
) -> dict[str, Any] | State[Any]:
    """A manifest in, a drafter that SGLang loads out. Run it again after anything: it goes on.

    Args:
        manifest: manifest.json of a finished run, or its directory; several with commas.
        out: Where the drafter goes; empty is drafter/finetuned in the run.
        init: A drafter's checkpoint to start from; empty is a fresh one.
        target_weights: The target's checkpoint directory; empty is the embedded target's.
        heldout_manifest: Another run whose held-out split is measured.
        weights: How often each manifest's samples come in an epoch, e.g. 1,0.5.
        limit: Samples to train on, a nested subset; 0 is all.
        heldout: Samples of the held-out slice.
        epochs: Passes over the samples.
        max_steps: Steps to take; 0 is as many as the epochs have.
        depths: Unrolled drafts; at least as many as will be served.
        loss: kl, lk or ce.
        decay: The weight of depth k is decay to the k.
        normalise: positions or masked.
        drop_outside: Leave out rows that no draft token can hit.
        optimizer: adamw, or muon for the matrices but lm_head.
        learning_rate: At the end of the warm-up.
        warmup: Share of the steps.
        weight_decay: Of matrices.
        clip: Largest norm of the gradient.
        ema: Decay of averaged weights; 0 is off.
        batch_tokens: Tokens packed into a micro-batch.
        max_tokens: Length at which samples are cut; 0 is batch_tokens.
        accumulate: Micro-batches of a step.
        seed: Of the order, and of fresh weights.
        fresh_vocab: Build a new vocabulary map; not with init.
        draft_vocab: Size of a new map; 0 is 32,000.
        device: auto, cpu or cuda.
        dtype: auto, float32 or bfloat16.
        attention: auto, eager or flex.
        compile: Fuse the loss on CUDA.
        graphs: Record a small drafter's kernels once and replay them.
        recompute: Less memory, more time.
        threads: Threads (with graphs: processes) that decode shards.
        checkpoint_every: Steps between checkpoints.
        evaluate_every: Steps between measurements.
        log_every: Steps between log lines.
        export_dtype: Of the written weights.
        allow_chance: Go on from an init checkpoint that scores at chance.
    """
    given = dict(locals())
    log = flow_logger()
    stopping = threading.Event()
    try:
        config = finetune_config(**given)
        training = asyncio.create_task(
            asyncio.to_thread(finetune_job, config, log.info, stopping.is_set)
        )
        try:
            outcome = await asyncio.shield(training)
        except asyncio.CancelledError:
            stopping.set()  # the step in progress ends, its checkpoint is written
            await asyncio.gather(training, return_exceptions=True)
            raise
    except DatagenError as e:
        log.error("%s", e)
        return Failed(message=str(e))  # raised, it would be a page of traceback
    await _show(config.out, outcome.before, outcome.after)
    await _tell(config.manifests[0], outcome.final)
    log.info("drafter: %s", outcome.final)
    return {
        "drafter": str(outcome.final),
        "steps": outcome.steps,
        "predicted_accept_len": outcome.after["predicted_accept_len"],
    }


async def _tell(manifest: Path, drafter: Path) -> None:
    """The event that an automation can wait for; without the server the drafter is no less done."""
    call = emit_drafter_written(manifest, drafter)
    try:
        await asyncio.wait_for(call, UI_TIMEOUT_S)
    except Exception as e:  # noqa: BLE001 - whatever the server throws, the drafter is done
        flow_logger().warning("no event is emitted (the drafter is written): %r", e)


async def _show(out: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """The curves and the numbers in the UI, which may fail: the drafter is on disk."""
    try:
        markdown = await asyncio.to_thread(_markdown, out, before, after)
        call = acreate_markdown_artifact(key="finetune", markdown=markdown, description=str(out))
        await asyncio.wait_for(call, UI_TIMEOUT_S)
    except Exception as e:  # noqa: BLE001 - whatever the UI throws, the drafter is done
        flow_logger().warning("the Prefect UI is not updated (the drafter is written): %r", e)


def _markdown(out: Path, before: dict[str, Any], after: dict[str, Any]) -> str:
    svg = base64.b64encode((out / "curves.svg").read_bytes()).decode()
    rows = ["| held-out | before | after |", "|---|---|---|"]
    known = before.get("conditional_acceptance") or [None] * len(after["conditional_acceptance"])
    lines = [
        ("predicted_accept_len", before.get("predicted_accept_len"), after["predicted_accept_len"])
    ]
    pairs = zip(known, after["conditional_acceptance"], strict=True)
    lines += [(f"conditional acceptance {k}", a, b) for k, (a, b) in enumerate(pairs, 1)]
    rows += [f"| {name} | {'?' if a is None else f'{a:.3f}'} | {b:.3f} |" for name, a, b in lines]
    table = "\n".join(rows)
    return (
        f"{table}\n\n![loss and acceptance](data:image/svg+xml;base64,{svg})\n\n"
        f"Drafter: `{out / 'final'}` · curves: `{out / 'curves.svg'}`\n"
    )
