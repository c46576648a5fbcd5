"""`datagen finetune` and `datagen drafter compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from datagen.cli.app import app, out

drafter_app = typer.Typer(help="Look at drafter checkpoints.", no_args_is_help=True)
app.add_typer(drafter_app, name="drafter")


@drafter_app.callback()
def _drafter() -> None:
    """Look at drafter checkpoints."""


@drafter_app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A drafter's checkpoint directory.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    target: Annotated[str, typer.Option(help="The target's model_type, e.g. kimi_k25.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Every tensor and every config key of two checkpoints: drop-in or not, and why. Exit 1 if not."""
    from datagen.drafter.compare import compare as compare_checkpoints

    found = compare_checkpoints(a, b, target_type=target or None)
    if as_json:
        out.print_json(json.dumps(found.as_dict()))
    else:
        table = Table(
            "tensor", "A", "B", "verdict", title=f"A = {a}\nB = {b}", title_justify="left"
        )
        for row in found.tensors:
            style = "red" if row.blocks else None
            table.add_row(row.name, row.a, row.b, row.verdict, style=style)
        out.print(table)
        if found.config:
            keys = Table("config", "A", "B")
            for cells in found.config:
                keys.add_row(*cells)
            out.print(keys)
        for reason in found.reasons:
            out.print(f"[red]not drop-in[/] {reason}", highlight=False, soft_wrap=True)
        if found.drop_in:
            out.print("drop-in compatible: same names, shapes, vocabulary map and arithmetic")
    if not found.drop_in:
        raise typer.Exit(1)
