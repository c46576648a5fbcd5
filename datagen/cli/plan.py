"""`datagen plan`: what a mix holds and costs, before anything is asked of a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from datagen.cli.app import app, err, out

if TYPE_CHECKING:
    from datagen.prompts.estimate import Cost, DiskCheck, PlanEstimate
    from datagen.prompts.report import PlanReport


@app.command()
def plan(
    mix: Annotated[str, typer.Argument(help="A mix by name, or the path of its .yaml.")] = "demo",
    target: Annotated[str, typer.Option(help="A profile by name, or its .yaml.")] = "smollm2",
    limit: Annotated[int, typer.Option(help="Prompts to take; 0 is the whole mix.")] = 0,
    tokenizer: Annotated[str, typer.Option(help="Directory of the target's tokenizer.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Per response; 0: the profile's.")] = 0,
    answer_tokens: Annotated[float, typer.Option(help="Expected mean answer; 0: 800.")] = 0,
    generate_tps: Annotated[float, typer.Option(help="Generated tokens/s of one server.")] = 0,
    prefill_tps: Annotated[float, typer.Option(help="Prefilled tokens/s of one server.")] = 0,
    speeds: Annotated[
        str, typer.Option(help="File of `datagen preflight --json`: takes both from there.")
    ] = "",
    servers: Annotated[int, typer.Option(help="Servers working together.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of one server.")] = 8,
    runs_dir: Annotated[str, typer.Option(help="Where the run would be written.")] = "runs",
    workers: Annotated[int, typer.Option(help="Processes that read.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Price a mix: rows, kinds, languages, lengths, tokens, bytes, hours, and room on the disk."""
    from datagen.embedded.weights import ensure_checkpoint
    from datagen.errors import ConfigError
    from datagen.prompts.estimate import RatioCounter, Speed, disk_check, estimate_plan
    from datagen.prompts.mix import load_mix
    from datagen.prompts.plan import build_plan
    from datagen.target.profile import load_profile
    from datagen.target.tokens import TemplateRenderer

    profile = load_profile(target)
    if speeds:
        generate_tps, prefill_tps = _measured(Path(speeds))
    source = tokenizer or (str(ensure_checkpoint()) if profile.embedded else "")
    ratio = RatioCounter()
    counter = (
        TemplateRenderer(
            source,
            thinking_kwarg=profile.thinking_kwarg,
            trust_remote_code=profile.trust_remote_code,
        )
        if source
        else ratio
    )
    if bool(generate_tps) != bool(prefill_tps):
        raise ConfigError(
            "one speed alone gives no hours", fix="give --generate-tps and --prefill-tps"
        )
    speed = Speed(generate_tps, prefill_tps, gpus, servers) if generate_tps else None
    with err.status("planning") as view:
        result = build_plan(
            load_mix(mix),
            renderer=counter,
            profile=profile,
            limit=limit or None,
            max_new_tokens=max_new_tokens or None,
            workers=workers,
            progress=lambda text: err.print(text, highlight=False),
            on_step=lambda stage, done, total: view.update(
                f"{stage}: {done:,}" + (f" of {total:,}" if total else "")
            ),
        )
        estimate = estimate_plan(
            result.rows,
            profile,
            answer_tokens=answer_tokens or None,
            speed=speed,
            token_ratio=None if source else ratio.ratio,
        )
    room = disk_check(Path(runs_dir), estimate.cost.stored_bytes["plane"])
    if as_json:
        report = result.report.as_dict()
        disk = {"path": room.path, "free_bytes": room.free_bytes, "enough": room.enough}
        out.print_json(json.dumps({**estimate.as_dict(), "report": report, "disk": disk}))
    else:
        _print(estimate, result.report, room)


def _measured(path: Path) -> tuple[float, float]:
    """Tokens/s of the slowest server that a preflight measured. Raises ConfigError."""
    from datagen.errors import ConfigError

    try:
        places = json.loads(path.read_text(encoding="utf-8"))["places"]
        found = [p["speeds"] for p in places if p["speeds"]]
        return (
            min(float(s["generate_tokens_per_s"]) for s in found),
            min(float(s["prefill_tokens_per_s"]) for s in found),
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"no speeds can be read: {e}",
            where=path,
            fix="write the file with `datagen preflight --json`, from a server that answers",
        ) from e


def _print(estimate: PlanEstimate, report: PlanReport, room: DiskCheck) -> None:
    from datagen.prompts.estimate import histogram_lines

    table = Table("what", "value", title=f"plan for {estimate.target}", title_justify="left")
    guessed = f" (estimated: {estimate.token_ratio})" if estimate.token_ratio else ""
    cost = estimate.cost
    rows = [
        ("prompts", f"{cost.prompts:,} ({_listed(estimate.prompts_by_split)})"),
        ("samples", f"{cost.samples:,} ({_listed(estimate.samples_by_split)})"),
        ("several turns / tools", f"{estimate.multi_turn:,} / {estimate.with_tools:,}"),
        ("languages", _listed(estimate.languages, 8)),
        ("sources", _listed(estimate.sources, 8)),
        ("licences", _listed(estimate.licences, 8)),
        ("dropped", _listed(dict(report.reasons().most_common()), 8) or "none"),
        ("prompt tokens", f"{estimate.prompt_tokens:,}{guessed}"),
        ("answer tokens", f"{estimate.answer_tokens:,.0f} each, expected"),
        ("tokens", f"{cost.generated_tokens:,} generated, {cost.captured_tokens:,} with states"),
        ("bytes a token, raw", f"{estimate.bytes_per_token:,}"),
    ]
    if estimate.thinking_on is not None:
        rows.append(("thinking on", f"{estimate.thinking_on:,} prompts"))
    needed = f"{_size(room.needed_bytes)} needed (plane), {_size(room.free_bytes)} free"
    rows.append((f"disk at {room.path}", needed if room.enough else f"[red]{needed}: too small[/]"))
    for name, value in rows:
        table.add_row(name, value)
    out.print(table)
    out.print(
        "prompt tokens          prompts", *histogram_lines(estimate), sep="\n", highlight=False
    )
    codecs = list(cost.stored_bytes)
    costs = Table("prompts", "samples", *codecs, "hours", "GPU hours", title="what it would take")
    for row in (cost, *estimate.scale):
        costs.add_row(*_cost_cells(row, codecs))
    out.print(costs)
    if cost.hours is None:
        out.print("hours: give --generate-tps and --prefill-tps, measured on the server")


def _cost_cells(cost: Cost, codecs: list[str]) -> list[str]:
    hours = ["?" if h is None else f"{h:,.1f}" for h in (cost.hours, cost.gpu_hours)]
    sizes = [_size(cost.stored_bytes[c]) for c in codecs]
    return [f"{cost.prompts:,}", f"{cost.samples:,}", *sizes, *hours]


def _listed(counts: dict[str, int], most: int = 20) -> str:
    shown = ", ".join(f"{n:,} {name}" for name, n in list(counts.items())[:most])
    return shown + (f" and {len(counts) - most} more" if len(counts) > most else "")


def _size(n_bytes: float) -> str:
    from datagen.collect.progress import format_bytes

    return format_bytes(n_bytes)
