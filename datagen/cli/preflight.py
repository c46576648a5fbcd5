"""`datagen preflight`: every assumption about a server, checked in a minute, as a table or JSON."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from datagen.cli.app import app, err, out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datagen.target.checks.verdict import ServerChecks

COLOURS = {"ok": "green", "red": "red", "skipped": "yellow"}


@app.command()
def preflight(
    target: Annotated[str, typer.Option(help="A profile by name, or its .yaml.")] = "smollm2",
    endpoints: Annotated[str, typer.Option(help="Server URLs, comma separated.")] = "",
    run: Annotated[str, typer.Option(help="A run whose plan needs room.")] = "demo",
    runs_dir: Annotated[str, typer.Option(help="Where runs named without a path live.")] = "runs",
    tokenizer: Annotated[str, typer.Option(help="Directory of the target's tokenizer.")] = "",
    spool_mib: Annotated[int, typer.Option(help="Most states in flight; 0: by width.")] = 0,
    concurrency: Annotated[int, typer.Option(help="First window of each endpoint.")] = 32,
    rendering: Annotated[str, typer.Option(help="Whose ids: ours, server, or auto.")] = "auto",
    capture_mode: Annotated[str, typer.Option(help="spool, or json for small runs.")] = "spool",
    final_endpoint: Annotated[
        str, typer.Option(help="json: a second server that hands over the final state.")
    ] = "",
    api_key: Annotated[str, typer.Option(envvar="DATAGEN_API_KEY", help="Bearer token.")] = "",
    accept_risk: Annotated[
        list[str] | None, typer.Option(help="A check that may be red; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Smaller probes, as at a run's start.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines, and for plan.")] = False,
) -> None:
    """Prove that a server gives what the drafter will be fed; exit 1 when a check is red."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in collect
    from datagen.collect.proof import disagreement
    from datagen.collect.proof import preflight as checked
    from datagen.config import collect_config
    from datagen.target.checks.subject import FULL, QUICK
    from datagen.target.checks.suite import NAMES

    config = collect_config(
        run=run, target=target, endpoints=endpoints, runs_dir=runs_dir, tokenizer=tokenizer,
        spool_mib=spool_mib, concurrency=concurrency, rendering=rendering,
        capture_mode=capture_mode, final_endpoint=final_endpoint, api_key=api_key,
        accept_risk=",".join(accept_risk or ()),
    )  # fmt: skip
    with err.status("asking the servers"):
        places = asyncio.run(
            checked(
                config,
                lambda text: err.print(text, highlight=False),
                effort=QUICK if quick else FULL,
                names=NAMES,
            )
        )
    red = [r for p in places for r in p.reds(config.accept_risk)]
    unlike = disagreement(places)
    if as_json:
        record = {
            "ok": not red and unlike is None,
            "accept_risk": list(config.accept_risk),
            "places": [p.as_dict() for p in places],
        }
        out.print_json(json.dumps(record))
    else:
        _print(places, config.accept_risk)
    if red:
        raise typer.Exit(1)
    if unlike is not None:
        raise unlike


def _print(places: Sequence[ServerChecks], accepted: Sequence[str]) -> None:
    for place in places:
        title = f"{place.where}, {place.seconds:.1f} s"
        table = Table("check", "", "measured", "expected", "fix", title=title, title_justify="left")
        for r in place.results:
            taken = " (accepted)" if r.status == "red" and r.name in accepted else ""
            mark = f"[{COLOURS[r.status]}]{r.status}{taken}[/]"
            table.add_row(r.name, mark, escape(r.measured), escape(r.expected), escape(r.fix or ""))
        out.print(table)
