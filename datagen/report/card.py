"""What the run card says, as sections of text, tables and plots; HTML and Markdown only render it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from datagen.errors import CorruptFile
from datagen.report.acceptance import evaluation_sections, scaling_section
from datagen.report.plots import Series, bar_plot, line_plot
from datagen.report.sections import Plot, Section, Table, text_of
from datagen.report.training import training_sections
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.seal import PartitionSummary


@dataclass(frozen=True, slots=True)
class Card:
    """A run's card. `verdict` in one sentence, `next_step` what to do now."""

    title: str
    verdict: str
    next_step: str
    sections: list[Section]


def run_card(root: Path) -> Card:
    """Read everything a run holds. Raises CorruptFile when it has no manifest."""
    manifest = Manifest.load(root / "manifest.json")
    evaluations = load_evaluations(root)
    shown = [
        e for e in evaluations if not e["name"].startswith("probe-")
    ]  # those are for the curve
    newest = shown[-1] if shown else None
    sections = [_collected(manifest), _sizes(manifest), _throughput(root, manifest)]
    sections += training_sections(root)
    for evaluation in reversed(shown):
        sections += evaluation_sections(evaluation)
    sections += scaling_section(evaluations, manifest)
    return Card(
        title=f"Run {manifest.run}: {manifest.target.get('model')}",
        verdict=newest["verdict"]["sentence"] if newest else "No drafter has been evaluated yet.",
        next_step=(
            newest["verdict"]["next_step"] if newest
            else "Fine-tune a drafter (`make finetune`) and evaluate it (`make evaluate`)."
        ),
        sections=sections,
    )  # fmt: skip


def load_evaluations(root: Path) -> list[dict[str, Any]]:
    """Every evaluation of a run, oldest first. Raises CorruptFile."""
    found = []
    for path in sorted((root / "evaluation").glob("*.json")):
        try:
            content = orjson.loads(path.read_bytes())
            content["verdict"]["sentence"], content["created"]
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as e:
            raise CorruptFile(
                f"no evaluation can be read: {e!r}", where=path, fix="run `datagen evaluate` again"
            ) from e
        found.append({**content, "name": path.stem})
    return sorted(found, key=lambda e: str(e["created"]))


def _collected(manifest: Manifest) -> Section:
    samples, target = manifest.samples, manifest.target
    rows = [
        ("target", f"{target.get('model')} (revision {text_of(target.get('revision'), 16)})"),
        ("engines", ", ".join(sorted({str(s.get("engine")) for s in manifest.servers})) or "unstated"),
        ("boundaries", f"{manifest.states.boundaries}, final state {manifest.states.final_norm}-norm"),
        ("codec", f"{manifest.states.codec}, {manifest.states.dtype}"),
        ("collected", (f"{samples.collected:,} of {samples.planned:,} samples planned, "
                      f"of {manifest.prompts:,} prompts")),
        ("rejected", _listed(samples.rejected) or "none"),
        ("pending", f"{samples.pending:,}"),
        ("states", f"{manifest.stored_bytes / 1e6:,.1f} MB stored, {manifest.raw_bytes / 1e6:,.1f} MB raw"),
        ("created", f"{manifest.created}, datagen {manifest.code_version}"),
        ("fingerprint", manifest.fingerprint[:16]),
    ]  # fmt: skip
    splits = [
        [name, f"{s.prompts:,}", f"{s.samples.collected:,}", f"{s.tokens_generated:,}",
         f"{s.tokens_captured:,}", _sampling(manifest.sampling.get(name))]
        for name, s in manifest.splits.items()
    ]  # fmt: skip
    heads = ["split", "prompts", "samples", "tokens generated", "tokens with states", "sampling"]
    return Section(
        "What was collected",
        tables=[
            Table("", ["what", "value"], [list(r) for r in rows]),
            Table("Splits", heads, splits),
        ],
    )


def _sizes(manifest: Manifest) -> Section:
    filled = [n for n, (_, count) in enumerate(manifest.length_histogram) if count]
    shown = manifest.length_histogram[min(filled, default=0) : max(filled, default=0) + 1]
    bars = [(f"{edge:,}+", float(n)) for edge, n in shown]
    plot = bar_plot("Length of samples, context and response", bars, y="samples")
    plots = [Plot(plot, [[b, f"{n:,.0f}"] for b, n in bars], ["tokens", "samples"])]
    if manifest.samples.rejected:
        rejected = [(r, float(n)) for r, n in manifest.samples.rejected.items()]
        plots.append(
            Plot(
                bar_plot("Rejected samples by reason", rejected, y="samples"),
                [[r, f"{n:,.0f}"] for r, n in rejected], ["reason", "samples"],
            )
        )  # fmt: skip
    return Section("Lengths and rejects", plots=plots)


def _throughput(root: Path, manifest: Manifest) -> Section:
    """Tokens sealed over time, from the partitions' seals."""
    layout = RunLayout(root)
    numbers = sorted({f.partition for f in manifest.files()})
    seals = sorted(
        (PartitionSummary.load(layout.partition(i).summary) for i in numbers),
        key=lambda s: s.sealed_at,
    )
    start = min((s.opened_at for s in seals), default=0.0)
    total, points = 0, [(0.0, 0.0)]
    for seal in seals:
        total += seal.tokens_captured
        points.append(((seal.sealed_at - start) / 60, float(total)))
    minutes = points[-1][0]
    generated = sum(s.tokens_generated for s in seals)
    rate = f"{generated / minutes / 60:,.1f}" if minutes else "?"
    text = (
        f"{generated:,} tokens generated and {total:,} stored with their states in {minutes:,.1f} "
        f"minutes between the first partition's opening and the last seal: {rate} generated tokens/s, "
        "pauses and resumes included."
    )
    plot = line_plot(
        "Tokens with states, sealed over time", [Series("tokens", tuple(points))],
        x="minutes", y="tokens", zero_y=True,
    )  # fmt: skip
    rows = [[f"{m:,.1f}", f"{t:,.0f}"] for m, t in points]
    return Section("Throughput", text=[text], plots=[Plot(plot, rows, ["minutes", "tokens"])])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in counts.items())


def _sampling(settings: Any) -> str:
    if not isinstance(settings, dict):
        return "unstated"
    return "greedy" if settings.get("temperature") == 0 else ", ".join(
        f"{k} {v}" for k, v in settings.items()
    )  # fmt: skip
