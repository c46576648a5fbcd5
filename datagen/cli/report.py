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
    generate_tps: Annotated[
        float, typer.Option(help="Tokens/s a server generates, to price more data.")
    ] = 0.0,
    prefill_tps: Annotated[float, typer.Option(help="Tokens/s a server captures.")] = 0.0,
    gpus: Annotated[int, typer.Option(help="GPUs of a server.")] = 8,
    servers: Annotated[int, typer.Option(help="Servers that would collect.")] = 1,
) -> None:
    """Write report.html and report.md: what was collected, what a drafter reaches, does it pay."""
    from datagen.errors import ConfigError
    from datagen.prompts.estimate import Speed
    from datagen.report.render import write_report

    if bool(generate_tps) != bool(prefill_tps):
        raise ConfigError(
            "one speed alone gives no hours", fix="give --generate-tps and --prefill-tps"
        )
    speed = Speed(generate_tps, prefill_tps, gpus, servers) if generate_tps else None
    for path in write_report(run_directory(run, runs_dir), speed):
        out.print(str(path), highlight=False, soft_wrap=True)
