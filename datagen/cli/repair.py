"""`datagen repair`: keep every good row of a damaged run, and have the target make the others again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from datagen.cli.app import app, err, out, partition_bar
from datagen.cli.commands import (
    RunArgument,
    RunsDir,
    collect_watched,
    print_summary,
    run_directory,
)

if TYPE_CHECKING:
    from datagen.store.repair import Repaired


@app.command()
def repair(
    run: RunArgument = "demo",
    runs_dir: RunsDir = "runs",
    endpoints: Annotated[str, typer.Option(help="Server URLs; empty: the run's own.")] = "",
    workers: Annotated[int, typer.Option(help="Partitions read at once; 0: one a core.")] = 0,
    recapture: Annotated[
        bool, typer.Option(help="Go on and collect what is missing; needs the target.")
    ] = True,
    api_key: Annotated[str, typer.Option(envvar="DATAGEN_API_KEY", help="Bearer token.")] = "",
) -> None:
    """Verify a run, keep its good rows, and recapture the others from their stored responses."""
    from datagen.collect.opening import stored_config
    from datagen.store.layout import RunLayout
    from datagen.store.lock import RunLock
    from datagen.store.repair import repair_run
    from datagen.store.run_status import run_status

    root = run_directory(run, runs_dir)
    layout = RunLayout(root)
    run_status(root)  # no run here: one line, before a lock file is made
    with RunLock(layout.lock), partition_bar(f"verifying {root}") as progress:
        done = repair_run(layout, workers=workers or None, progress=progress)
    _say(done)
    if layout.manifest.exists():
        out.print(f"{root}: sound, nothing to repair", highlight=False)
        return
    if not recapture:
        pending = run_status(root).pending
        out.print(f"{pending:,} samples are pending; collect the run again", highlight=False)
        return
    import uvloop

    config = stored_config(root, endpoints=endpoints, api_key=api_key)
    print_summary(uvloop.run(collect_watched(config, frozen=True)), root)


def _say(done: Repaired) -> None:
    for fault in done.faults:
        err.print(f"fault {fault}", highlight=False, markup=False, soft_wrap=True)
    if done.partitions:
        rows = ", ".join(f"{n:,} {what}" for what, n in done.rows.items() if n)
        out.print(f"{len(done.partitions):,} partitions repaired: {rows}", highlight=False)
