"""`datagen retry`: take rejections back, so that the next collect asks for these samples again."""

from __future__ import annotations

from typing import Annotated

import typer

from datagen.cli.app import app, out
from datagen.cli.commands import RunArgument, RunsDir, run_directory


@app.command()
def retry(
    run: RunArgument = "demo",
    rejected: Annotated[str, typer.Option(help="The reason to take back.")] = "",
    runs_dir: RunsDir = "runs",
) -> None:
    """Re-open the samples rejected with one reason; collect the run again to ask for exactly these."""
    from datagen.errors import ConfigError
    from datagen.store.layout import RunLayout
    from datagen.store.lock import RunLock
    from datagen.store.retry import retry_rejected
    from datagen.store.run_status import run_status

    layout = RunLayout(run_directory(run, runs_dir))
    status = run_status(layout.root)
    if not rejected:
        reasons = ", ".join(f"{r} ({n})" for r, n in sorted(status.rejected.items()))
        raise ConfigError(
            "no reason is named",
            where=layout.root,
            fix=f"--rejected REASON, one of {reasons}" if reasons else "the run has no rejections",
        )
    with RunLock(layout.lock):
        done = retry_rejected(layout, rejected)
    more = f" and {done.followers:,} later turns of theirs" if done.followers else ""
    out.print(
        f"{done.samples:,} samples rejected with {rejected}{more} are pending again, in "
        f"{done.partitions:,} partitions; run the collect of {layout.root.name} again to ask for them",
        highlight=False,
        soft_wrap=True,
    )
