"""`datagen report`: the run card."""

from __future__ import annotations

from typing import Annotated

import typer

from datagen.cli.app import app, out
from datagen.cli.commands import run_directory


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run's name, or its directory.")] = "demo",
    runs_dir: Annotated[str, typer.Option(help="Where runs named without a path live.")] = "runs",
) -> None:
    """Write report.html and report.md: what was collected, what a drafter reaches, does it pay."""
    from datagen.report.render import write_report

    for path in write_report(run_directory(run, runs_dir)):
        out.print(str(path), highlight=False, soft_wrap=True)
