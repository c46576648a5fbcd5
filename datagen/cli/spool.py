"""`datagen spool gc`: remove what servers and collectors that died left in a spool."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from datagen.cli.app import app, out
from datagen.errors import ConfigError

spool_app = typer.Typer(help="The files through which a server hands hidden states over.")
app.add_typer(spool_app, name="spool")


@spool_app.callback()
def spool() -> None:
    """The files through which a server hands hidden states over."""


@spool_app.command()
def gc(
    directory: Annotated[Path, typer.Argument(help="A server's DATAGEN_CAPTURE_DIR.")],
    older_than_s: Annotated[float, typer.Option("--older-than", help="Seconds untouched.")] = 900.0,
) -> None:
    """Remove captures, error notes and half-written files that nobody touched for a while."""
    from datagen.capture.spool import sweep

    if older_than_s < 0:
        raise ConfigError("--older-than must be 0 or more", where=str(older_than_s))
    try:
        swept = sweep(directory, older_than_s=older_than_s, now=time.time())
    except OSError as e:
        raise ConfigError(
            f"the spool cannot be swept: {e.strerror}",
            where=directory,
            fix="name the directory given to the server",
        ) from e
    out.print(f"removed {swept.n_files} files, {swept.n_bytes:,} bytes", highlight=False)
