"""Sections about fine-tuning: what was trained on what, its loss, and its held-out acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from datagen.drafter.curves import read_metrics
from datagen.drafter.settings import TrainConfig
from datagen.errors import CorruptFile
from datagen.report.plots import Series, line_plot
from datagen.report.sections import Plot, Section, Table

COVERED_SHOWN = 12


def training_sections(root: Path) -> list[Section]:
    """One for every fine-tuned drafter below the run, in order of name. Raises CorruptFile."""
    logs = sorted((root / "drafter").glob("*/metrics.jsonl"))
    return [_training(log.parent) for log in logs]


def _training(folder: Path) -> Section:
    try:
        records = read_metrics(folder / "metrics.jsonl")
        train = [r for r in records if r["kind"] == "train"]
        held = [r for r in records if r["kind"] == "heldout"]
        told = folder / "final" / "provenance.json"
        provenance = orjson.loads(told.read_bytes()) if told.exists() else None
        plots = _plots(train, held)
        tables = _tables(held, provenance)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CorruptFile(
            f"no training log can be read: {e!r}", where=folder, fix="delete the directory"
        ) from e
    text = (
        [] if provenance else ["Not finished: the same command again goes on from its checkpoint."]
    )
    return Section(f"Drafter {folder.name}: training", text=text, tables=tables, plots=plots)


def _tables(held: list[dict[str, Any]], provenance: dict[str, Any] | None) -> list[Table]:
    tables = []
    if held:
        first, last = held[0], held[-1]
        rows = [
            [name, f"{first[name]:.3f}", f"{last[name]:.3f}"]
            for name in ("predicted_accept_len", "best_constant")
        ]
        pairs = zip(first["conditional_acceptance"], last["conditional_acceptance"], strict=True)
        rows += [
            [f"conditional acceptance {k}", f"{a:.3f}", f"{b:.3f}"]
            for k, (a, b) in enumerate(pairs, 1)
        ]
        heads = [f"held-out, {last['rows']:,} rows", "before", f"step {last['step']:,}"]
        tables.append(Table("", heads, rows))
    if provenance:
        settings, samples = provenance["settings"], provenance["samples"]
        rows = [
            ["samples", f"{samples['train']:,} trained, {samples['heldout']:,} held out"],
            ["start", str(provenance["init"].get("path", provenance["init"]["kind"]))],
            ["loss", f"{settings['loss']}, {settings['depths']} depths, decay {settings['decay']}"],
            ["optimizer", settings.get("optimizer", TrainConfig().optimizer)],  # once the only one
            ["learning rate", f"{settings['learning_rate']:g}"],
            ["steps", (f"{provenance['step']:,} of {settings['batch_tokens']:,} tokens x "
             f"{settings['accumulate']} x {settings['ranks']} processes")],
            ["vocabulary map", provenance["vocab_sha256"][:16]],
        ]  # fmt: skip
        tables.append(Table("Training", ["what", "value"], rows))
        worst = sorted((share, name) for name, share in provenance["vocab_coverage"].items())
        covered = [[name, f"{share:.1%}"] for share, name in worst[:COVERED_SHOWN]]
        tables.append(
            Table(
                "Supervised tokens inside the draft vocabulary", ["least first", "share"], covered
            )
        )
    return tables


def _plots(train: list[dict[str, Any]], held: list[dict[str, Any]]) -> list[Plot]:
    plots = []
    if train:
        points = [(float(r["step"]), float(r["loss"])) for r in train]
        svg = line_plot(
            "Loss of a trained row", [Series("loss", tuple(points))], x="step", y="loss"
        )
        rows = [[f"{s:,.0f}", f"{v:.3f}"] for s, v in points]
        plots.append(Plot(svg, rows, ["step", "loss"]))
    if held:
        depths = range(len(held[0]["conditional_acceptance"]))
        series = [
            Series(
                f"depth {k + 1}",
                tuple((float(r["step"]), float(r["conditional_acceptance"][k])) for r in held),
            )
            for k in depths
        ]
        svg = line_plot(
            "Held-out conditional acceptance", series, x="step", y="acceptance", zero_y=True
        )
        rows = [
            [f"{r['step']:,}", *(f"{a:.3f}" for a in r["conditional_acceptance"])] for r in held
        ]
        plots.append(Plot(svg, rows, ["step", *(f"depth {k + 1}" for k in depths)]))
    return plots
