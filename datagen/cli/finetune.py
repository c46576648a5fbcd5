"""`datagen finetune` and `datagen drafter compare`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from datagen.cli.app import app, err, out

if TYPE_CHECKING:
    from datagen.drafter.train import Outcome

drafter_app = typer.Typer(help="Look at drafter checkpoints.", no_args_is_help=True)
app.add_typer(drafter_app, name="drafter")


@drafter_app.callback()
def _drafter() -> None:
    """Look at drafter checkpoints."""


@drafter_app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A drafter's checkpoint directory.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    target: Annotated[str, typer.Option(help="The target's model_type, e.g. kimi_k25.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Every tensor and every config key of two checkpoints: drop-in or not, and why. Exit 1 if not."""
    from datagen.drafter.compare import compare as compare_checkpoints

    found = compare_checkpoints(a, b, target_type=target or None)
    if as_json:
        out.print_json(json.dumps(found.as_dict()))
    else:
        table = Table(
            "tensor", "A", "B", "verdict", title=f"A = {a}\nB = {b}", title_justify="left"
        )
        for row in found.tensors:
            style = "red" if row.blocks else None
            table.add_row(row.name, row.a, row.b, row.verdict, style=style)
        out.print(table)
        if found.config:
            keys = Table("config", "A", "B")
            for cells in found.config:
                keys.add_row(*cells)
            out.print(keys)
        for reason in found.reasons:
            out.print(f"[red]not drop-in[/] {reason}", highlight=False, soft_wrap=True)
        if found.drop_in:
            out.print("drop-in compatible: same names, shapes, vocabulary map and arithmetic")
    if not found.drop_in:
        raise typer.Exit(1)


@app.command()
def finetune(
    manifest: Annotated[str, typer.Argument(help="manifest.json of a run; several with commas.")],
    out_dir: Annotated[
        str, typer.Option("--out", help="Empty: drafter/finetuned in the run.")
    ] = "",
    init: Annotated[str, typer.Option(help="A drafter's checkpoint to start from.")] = "",
    target_weights: Annotated[str, typer.Option(help="The target's checkpoint directory.")] = "",
    heldout_manifest: Annotated[str, typer.Option(help="Another run's held-out split.")] = "",
    weights: Annotated[str, typer.Option(help="How often each manifest counts: 1,0.5")] = "",
    limit: Annotated[int, typer.Option(help="Samples, a nested subset; 0 is all.")] = 0,
    heldout: Annotated[int, typer.Option(help="Samples of the held-out slice.")] = 64,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.")] = 1,
    max_steps: Annotated[int, typer.Option(help="0: as many as the epochs have.")] = 0,
    depths: Annotated[int, typer.Option(help="Unrolled drafts; at least those served.")] = 5,
    loss: Annotated[str, typer.Option(help="kl, lk or ce.")] = "kl",
    decay: Annotated[float, typer.Option(help="Weight of depth k is decay^k.")] = 0.8,
    normalise: Annotated[str, typer.Option(help="positions or masked.")] = "positions",
    drop_outside: Annotated[bool, typer.Option(help="Skip rows no draft token can hit.")] = True,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="At the end of the warm-up.")] = 1e-4,
    warmup: Annotated[float, typer.Option(help="Share of the steps.")] = 0.02,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 0.5,
    ema: Annotated[float, typer.Option(help="Decay of averaged weights; 0 is off.")] = 0.0,
    batch_tokens: Annotated[int, typer.Option(help="Tokens packed into a micro-batch.")] = 4096,
    max_tokens: Annotated[int, typer.Option(help="Samples are cut there; 0: batch_tokens.")] = 0,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step, per rank.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order and of fresh weights.")] = 0,
    fresh_vocab: Annotated[bool, typer.Option(help="A new vocabulary map (no --init).")] = False,
    draft_vocab: Annotated[int, typer.Option(help="Size of a new map; 0: 32,000.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    attention: Annotated[str, typer.Option(help="auto, eager, flex.")] = "auto",
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="On CUDA.")] = True,
    graphs: Annotated[bool, typer.Option(help="Record a small drafter's kernels.")] = True,
    recompute: Annotated[bool, typer.Option(help="Less memory, more time.")] = False,
    threads: Annotated[int, typer.Option(help="That decode shards; processes with --graphs.")] = 4,
    checkpoint_every: Annotated[int, typer.Option(help="Steps.")] = 200,
    evaluate_every: Annotated[int, typer.Option(help="Steps.")] = 200,
    log_every: Annotated[int, typer.Option(help="Steps.")] = 10,
    export_dtype: Annotated[str, typer.Option(help="Of the written weights.")] = "bfloat16",
    allow_chance: Annotated[bool, typer.Option(help="Go on from a useless init.")] = False,
) -> None:
    """Fine-tune a drafter on collected states. Resumes itself; several GPUs: accelerate launch."""
    from datagen.finetune import finetune as finetune_job
    from datagen.finetune import finetune_config

    config = finetune_config(
        manifest=manifest, out=out_dir, init=init, target_weights=target_weights,
        heldout_manifest=heldout_manifest, weights=weights, limit=limit, heldout=heldout,
        epochs=epochs, max_steps=max_steps, depths=depths, loss=loss, decay=decay,
        normalise=normalise, drop_outside=drop_outside, optimizer=optimizer,
        learning_rate=learning_rate, warmup=warmup, weight_decay=weight_decay, clip=clip,
        ema=ema, batch_tokens=batch_tokens, max_tokens=max_tokens, accumulate=accumulate,
        seed=seed, fresh_vocab=fresh_vocab,
        draft_vocab=draft_vocab, device=device, dtype=dtype, attention=attention,
        compile=compile_, graphs=graphs, recompute=recompute, threads=threads,
        checkpoint_every=checkpoint_every, evaluate_every=evaluate_every, log_every=log_every,
        export_dtype=export_dtype, allow_chance=allow_chance,
    )  # fmt: skip
    stopping = False

    def stop(_number: int, _frame: Any) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        err.print("stopping after this step; once more to abort now")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    outcome = finetune_job(
        config,
        lambda text: err.print(text, highlight=False, markup=False, soft_wrap=True),
        lambda: stopping,
    )
    print_outcome(outcome)


def print_outcome(outcome: Outcome) -> None:
    """Held-out acceptance before and after, by depth, and where the drafter lies."""
    table = Table("held-out", "before", "after", title=str(outcome.final), title_justify="left")
    before, after = outcome.before, outcome.after
    rows = [("predicted_accept_len", "predicted_accept_len"), ("rows", "rows")]
    for label, key in rows:
        table.add_row(label, _number(before.get(key)), _number(after.get(key)))
    for depth, value in enumerate(after["conditional_acceptance"], 1):
        known = before.get("conditional_acceptance")
        cell = _number(known[depth - 1]) if known else "?"
        table.add_row(f"conditional acceptance {depth}", cell, _number(value))
    out.print(table)
    out.print("predicted_accept_len is over all rows; replay and live give the served accept_len")


def _number(value: Any) -> str:
    return "?" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
