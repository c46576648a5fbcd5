"""What a number of samples would cost to collect: bytes and hours, by the figures of `datagen plan`.

A run knows the tokens of its samples, and their bytes under its codec. Hours need a speed: the servers'
own, as `datagen plan` takes them, or else the pace of this run from its first opening to its last seal,
whatever it ran on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from datagen.prompts.estimate import Speed, hours_on
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.seal import PartitionSummary


@dataclass(frozen=True, slots=True)
class Price:
    """Of `samples` samples like a run's. `gpu_hours` None where no speed of servers was given."""

    samples: int
    stored_bytes: float
    hours: float | None
    gpu_hours: float | None
    basis: str

    def __str__(self) -> str:
        hours = "?" if self.hours is None else f"{self.hours:,.1f}"
        gpu = "" if self.gpu_hours is None else f" ({self.gpu_hours:,.0f} GPU hours)"
        return (
            f"{self.samples:,} samples are {self.stored_bytes / 1e12:,.3f} TB of states and {hours} "
            f"hours{gpu} {self.basis}"
        )


def price(samples: float, root: Path, manifest: Manifest, speed: Speed | None = None) -> Price:
    """The cost of `samples` samples like those of the run at `root`."""
    known = max(manifest.samples.collected, 1)
    stored = manifest.stored_bytes / known * samples
    if speed is None:
        seconds = elapsed_s(root, manifest)
        hours = seconds / known * samples / 3600 if seconds else None
        return Price(round(samples), stored, hours, None, "at this run's pace and codec")
    generated = sum(s.tokens_generated for s in manifest.splits.values())
    captured = sum(s.tokens_captured for s in manifest.splits.values())
    factor = samples / known
    hours = hours_on(speed, generated * factor, captured * factor)
    gpu_hours = hours * speed.servers * speed.gpus_per_server
    basis = (
        f"at {speed.generate_tokens_per_s:,.0f} generated and {speed.prefill_tokens_per_s:,.0f} "
        f"captured tokens/s on {speed.servers} server{'s' if speed.servers > 1 else ''}"
    )
    return Price(round(samples), stored, hours, gpu_hours, basis)


def elapsed_s(root: Path, manifest: Manifest) -> float:
    """From the first partition's opening to the last seal, pauses included. Raises CorruptFile."""
    layout = RunLayout(root)
    numbers = sorted({f.partition for f in manifest.files()})
    seals = [PartitionSummary.load(layout.partition(n).summary) for n in numbers]
    if not seals:
        return 0.0
    return max(s.sealed_at for s in seals) - min(s.opened_at for s in seals)
