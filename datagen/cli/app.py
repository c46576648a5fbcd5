"""The application, its consoles, and its exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from datagen.errors import DatagenError, Interrupted

app = typer.Typer(
    name="datagen",
    help="From prompts to EAGLE-3 drafter training data, and to the answer: does a drafter pay?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out, err = Console(), Console(stderr=True)


@contextlib.contextmanager
def partition_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; yields what takes (partitions done, partitions in all)."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("partitions"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def main() -> None:
    """Entry point: one line for a known error, exit 1; 130 when interrupted."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        err.print("datagen: interrupted")
        sys.exit(130)
    except Interrupted as e:
        err.print(f"datagen: {e}", highlight=False, markup=False, soft_wrap=True)
        sys.exit(130)
    except DatagenError as e:
        err.print(f"datagen: error: {e}", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
