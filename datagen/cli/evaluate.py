"""`datagen evaluate`: the accept_len of a drafter on held-out prompts, and whether it pays."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from datagen.cli.app import app, err, out


@app.command()
def evaluate(
    manifest: Annotated[str, typer.Argument(help="manifest.json of a run, or the run.")],
    drafter: Annotated[
        str, typer.Option(help="A checkpoint; empty: drafter/finetuned in the run.")
    ] = "",
    against: Annotated[str, typer.Option(help="Another drafter, compared on the same.")] = "",
    name: Annotated[str, typer.Option(help="Of evaluation/NAME.json; empty: the drafter's.")] = "",
    steps: Annotated[int, typer.Option(help="Draft tokens per verify cycle, K.")] = 3,
    split: Annotated[str, typer.Option(help="Which samples.")] = "heldout",
    limit: Annotated[int, typer.Option(help="Samples, a nested subset; 0 is all.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 as an engine.")] = "float32",
    target: Annotated[str, typer.Option(help="The target's profile; empty: the run's.")] = "",
    target_weights: Annotated[str, typer.Option(help="The target's checkpoint directory.")] = "",
    live: Annotated[str, typer.Option(help="URL of a server with the drafter, or: embedded.")] = "",
    baseline_url: Annotated[str, typer.Option(help="URL of the same without it.")] = "",
    grid: Annotated[
        str, typer.Option(help="Servers to start and measure: a .yaml, or draft steps as 1,2,3.")
    ] = "",
    live_dtype: Annotated[str, typer.Option(help="Of embedded servers.")] = "bfloat16",
    concurrencies: Annotated[str, typer.Option(help="Of the live sitting: 1,8,32")] = "1",
    rounds: Annotated[int, typer.Option(help="Passes per server and concurrency.")] = 2,
    live_prompts: Annotated[int, typer.Option(help="Prompts of the sitting.")] = 50,
    baseline: Annotated[float, typer.Option(help="Known tokens/s without a drafter.")] = 0.0,
    cycle_ms: Annotated[float, typer.Option(help="Known time of a verify cycle.")] = 0.0,
    targets: Annotated[str, typer.Option(help="Tokens/s wished for, e.g. 150,200.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Replay a drafter on held-out samples, measure it live where servers are given, and judge."""
    from datagen.evaluate import evaluate as evaluate_job
    from datagen.evaluate import evaluate_config

    config = evaluate_config(
        manifest=manifest, drafter=drafter, against=against, name=name, steps=steps, split=split,
        limit=limit, device=device, dtype=dtype, target=target, target_weights=target_weights,
        live=live, live_dtype=live_dtype, baseline_url=baseline_url, grid=grid,
        concurrencies=concurrencies, rounds=rounds, live_prompts=live_prompts,
        baseline=baseline, cycle_ms=cycle_ms, targets=targets,
    )  # fmt: skip
    result = evaluate_job(
        config, lambda text: err.print(text, highlight=False, markup=False, soft_wrap=True)
    )
    if as_json:
        out.print_json(json.dumps(result))
    else:
        print_evaluation(result)


def print_evaluation(result: dict[str, Any]) -> None:
    """The figures and the sentence."""
    replay = result["replay"]
    table = Table("what", "value", title=result["drafter"]["path"], title_justify="left")
    table.add_row("accept_len", _interval(replay["accept_len"]))
    for depth, value in enumerate(replay["conditional_acceptance"], 1):
        table.add_row(f"acceptance of draft {depth}", "?" if value is None else f"{value:.1%}")
    table.add_row(
        "held-out", f"{result['split']['prompts']:,} prompts, {replay['tokens']:,} tokens"
    )
    table.add_row("disjoint from training", result["split"]["disjoint_from_training"])
    table.add_row("responses that loop", f"{replay['looping_share']:.1%}")
    for speed in result.get("live", {}).get("speeds", ()):
        table.add_row(
            f"live, concurrency {speed['concurrency']}",
            f"{speed['speculative_tokens_per_s']:.1f} tok/s, {speed['baseline_tokens_per_s']:.1f} "
            f"without ({speed['speedup']:.2f}x), cycle {speed['cycle_ms']:.1f} ms",
        )
    if "live" in result:
        table.add_row("live accept_len", _interval(result["live"]["accept_len"]))
        table.add_row("live accept_len_raw", f"{result['live']['accept_len_raw']:.3f}")
    for row in result.get("grid", {}).get("settings", ()):
        if "error" in row:
            table.add_row(f"setting {row['name']}", f"not measured: {escape(row['error'])}")
            continue
        rates = ", ".join(f"{s['speedup']:.2f}x at {s['concurrency']}" for s in row["speeds"])
        table.add_row(
            f"setting {row['name']}", f"accept_len {_interval(row['accept_len'])}, {rates}"
        )
    if "comparison" in result:
        about = result["comparison"]
        table.add_row(f"against {about['against']['path']}", about["text"])
    out.print(table)
    out.print(result["verdict"]["sentence"], highlight=False, soft_wrap=True)
    out.print(result["verdict"]["next_step"], highlight=False, soft_wrap=True)


def _interval(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['value']:.3f} (no interval)"
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
