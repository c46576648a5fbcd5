"""Where the files of a run lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PART = ".part"
_NUMBERED = re.compile(r"(responses|states)-(\d{3,})\.arrow(\.part)?$")


@dataclass(frozen=True, slots=True)
class PartitionLayout:
    """The files of one partition; partitions share none."""

    root: Path

    @property
    def journal(self) -> Path:
        """Outcomes, one fixed-size record each."""
        return self.root / "journal.log"

    @property
    def rejected(self) -> Path:
        """Rejections with their details, one JSON object a line."""
        return self.root / "rejected.jsonl"

    @property
    def summary(self) -> Path:
        """The seal: written last."""
        return self.root / "partition.json"

    def responses(self, number: int) -> Path:
        """A sealed file of responses."""
        return self.root / f"responses-{number:03d}.arrow"

    def states(self, number: int) -> Path:
        """A sealed shard of hidden states."""
        return self.root / f"states-{number:03d}.arrow"

    def numbers(self, kind: str) -> list[int]:
        """Numbers of the `responses` or `states` files present, sealed or open."""
        if not self.root.is_dir():
            return []
        found = (_NUMBERED.match(p.name) for p in self.root.iterdir())
        return sorted({int(m[2]) for m in found if m and m[1] == kind})


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The files of a run."""

    root: Path

    @property
    def run_yaml(self) -> Path:
        """The settings the run was started with, for people."""
        return self.root / "run.yaml"

    @property
    def fingerprint(self) -> Path:
        """What decides the content of rows."""
        return self.root / "fingerprint.json"

    @property
    def plan(self) -> Path:
        """The frozen prompts."""
        return self.root / "plan.arrow"

    @property
    def prompt_report(self) -> Path:
        """What the prompt stage accepted and dropped, and why."""
        return self.root / "prompts.json"

    @property
    def lock(self) -> Path:
        """Held by the one process that writes."""
        return self.root / ".lock"

    @property
    def manifest(self) -> Path:
        """The hand-off: written last."""
        return self.root / "manifest.json"

    def partition(self, index: int) -> PartitionLayout:
        """The files of partition `index`."""
        return PartitionLayout(self.root / "partitions" / f"{index:05d}")


def part(path: Path) -> Path:
    """The name a file has until it is sealed."""
    return path.with_name(path.name + PART)
