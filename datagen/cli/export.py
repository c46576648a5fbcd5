"""`datagen export`: a finished run in the layout of another trainer, or as a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from datagen.cli.app import app, err, out


@app.command()
def export(
    manifest: Annotated[Path, typer.Argument(help="manifest.json, or the run's directory.")],
    layout: Annotated[str, typer.Option("--format", help="speculators, specforge, huggingface.")],
    output: Annotated[Path, typer.Option(help="A new or empty directory.")],
    split: Annotated[str, typer.Option(help="train, heldout or all.")] = "train",
    states: Annotated[bool, typer.Option(help="huggingface: hidden states too.")] = False,
    checkpoint: Annotated[
        str, typer.Option(help="speculators: the target's checkpoint, for its final norm.")
    ] = "",
) -> None:
    """Write a run's samples as speculators, SpecForge or Hugging Face datasets read them."""
    from datagen.errors import ConfigError
    from datagen.export.samples import FORMATS, Source, new_directory

    if layout not in FORMATS:
        raise ConfigError(f"unknown format '{layout}'", fix=f"use one of {', '.join(FORMATS)}")
    source = Source.open(manifest)
    splits = source.splits(split)
    with err.status(f"exporting to {output}"), new_directory(output) as unfinished:
        if layout == "speculators":
            from datagen.export.speculators import export_speculators

            written = export_speculators(
                source, splits, unfinished, _checkpoint(source.root, checkpoint)
            )
        elif layout == "specforge":
            from datagen.export.specforge import export_specforge

            written = export_specforge(source, splits, unfinished)
        else:
            from datagen.export.huggingface import export_huggingface

            written = export_huggingface(source, splits, unfinished, with_states=states)
    out.print(f"{written:,} samples of {', '.join(splits)} in {output}", highlight=False)


def _checkpoint(root: Path, given: str) -> Path:
    if given:
        return Path(given)
    from datagen.collect.opening import tokenizer_source

    return Path(tokenizer_source(root)[0])
