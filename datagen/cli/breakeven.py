"""`datagen breakeven`: what a drafter must reach before it pays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from datagen.cli.app import app, out
from datagen.errors import ConfigError

if TYPE_CHECKING:
    from datagen.acceptance.breakeven import BreakEven, Requirement


@app.command()
def breakeven(
    baseline: Annotated[float, typer.Option(help="Tokens/s of one request without a drafter.")],
    cycle_ms: Annotated[float, typer.Option(help="Milliseconds of one verify cycle.")],
    targets: Annotated[str, typer.Option(help="Tokens/s wished for, e.g. 150,200.")] = "",
    steps: Annotated[int, typer.Option(help="Draft steps K (num_draft_tokens - 1).")] = 3,
    measured: Annotated[
        str, typer.Option(help="accept_len@K of drafters, e.g. 2.05@2,3.35@3.")
    ] = "",
    at_batch: Annotated[
        list[str] | None,
        typer.Option(help="BATCH:BASELINE:CYCLE_MS of a further batch size; may be repeated."),
    ] = None,
    plausible: Annotated[float, typer.Option(help="Highest acceptance to count on.")] = 0.95,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say which accept_len, and which accuracy per draft token, a rate takes at a cycle time."""
    from datagen.acceptance.breakeven import break_even

    wished = _numbers(targets, "--targets")
    pairs = [_pair(text) for text in _parts(measured)]
    batches = [(1, baseline, cycle_ms), *(_batch(text) for text in at_batch or [])]
    results = [
        break_even(
            baseline=rate, cycle_ms=cycle, steps=steps, targets=wished, measured=pairs,
            plausible=plausible, batch=batch,
        )
        for batch, rate, cycle in batches
    ]  # fmt: skip
    if as_json:
        out.print_json(
            json.dumps([r.as_dict() for r in results] if at_batch else results[0].as_dict())
        )
        return
    for result in results:
        _print(result)


def _print(result: BreakEven) -> None:
    k = result.steps
    table = Table(
        "tok/s", "accept_len", "endless chain", f"K = {k}", "smallest K", "cycle up to",
        title=f"batch {result.batch}: baseline {result.baseline:g} tok/s, cycle "
        f"{result.cycle_ms:g} ms, K = {k}",
        title_justify="left",
    )  # fmt: skip
    for r in result.requirements:
        table.add_row(*_cells(r, result))
    out.print(table)
    by_steps = Table(
        "tok/s", *(f"K = {n}" for n in result.requirements[0].acceptance_by_steps),
        title="acceptance of every draft token that K drafts take", title_justify="left",
    )  # fmt: skip
    for r in result.requirements:
        by_steps.add_row(f"{r.tokens_per_s:g}", *map(_percent, r.acceptance_by_steps.values()))
    out.print(by_steps)
    out.print(
        f"With K = {k} a cycle delivers at most {k + 1} tokens: "
        f"{result.most_tokens_per_s:.0f} tok/s at {result.cycle_ms:g} ms, at any accuracy.",
        highlight=False,
    )
    for r in result.requirements:
        if r.acceptance is None:
            out.print(
                f"{r.tokens_per_s:g} tok/s is out of reach at K = {k}: it takes {r.accept_len:.2f} "
                f"tokens a cycle.",
                highlight=False,
            )
    for m in result.measured:
        verdict = "pays" if m.pays else "does not pay"
        out.print(
            f"accept_len {m.accept_len:g} at K = {m.steps} is an acceptance of {m.acceptance:.0%} "
            f"({m.geometric_acceptance:.0%} by the endless chain); at K = {k} it gives "
            f"{m.at_served_steps:.2f}, {m.tokens_per_s:.0f} tok/s: it {verdict}.",
            highlight=False,
            soft_wrap=True,
        )


def _cells(r: Requirement, result: BreakEven) -> list[str]:
    growth, smallest = "-", "none"
    if r.smallest_steps is not None and r.smallest_steps_acceptance is not None:
        smallest = f"{r.smallest_steps} (at {r.smallest_steps_acceptance:.0%})"
    if r.longest_cycle_ms is not None:
        more = r.longest_cycle_ms / result.cycle_ms - 1
        growth = f"{r.longest_cycle_ms:.1f} ms ({more:+.0%})"
    mark = "\nbreak-even" if r is result.requirements[0] else ""
    return [
        f"{r.tokens_per_s:g}{mark}", f"{r.accept_len:.2f}", _percent(r.geometric_acceptance),
        "unreachable" if r.acceptance is None else _percent(r.acceptance), smallest, growth,
    ]  # fmt: skip


def _percent(p: float | None) -> str:
    return "-" if p is None else f"{p:.0%}"


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in _parts(text)]
    except ValueError as e:
        raise ConfigError(f"{option} '{text}' is no list of numbers", fix="e.g. 150,200") from e


def _pair(text: str) -> tuple[float, int]:
    value, _, steps = text.partition("@")
    try:
        return float(value), int(steps)
    except ValueError as e:
        raise ConfigError(f"--measured '{text}' is not ACCEPT_LEN@K", fix="e.g. 2.05@2") from e


def _batch(text: str) -> tuple[int, float, float]:
    try:
        batch, rate, cycle = text.split(":")
        return int(batch), float(rate), float(cycle)
    except ValueError as e:
        raise ConfigError(
            f"--at-batch '{text}' is not BATCH:BASELINE:CYCLE_MS", fix="e.g. 8:45:38"
        ) from e
