"""What a verification finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from datagen.store.states import StatesSpec


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: file (relative to the run), row if there is one, what."""

    file: str
    row: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.row is None else f' row {self.row}'}: {self.what}"


@dataclass(slots=True)
class Findings:
    """Of one partition: counts of what was really read, rejections by reason, kinds of shards."""

    counts: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    specs: set[StatesSpec] = field(default_factory=set)


def relative_to(root: Path, where: str | Path) -> str:
    """A path as people know it: from the run on."""
    return str(where).removeprefix(f"{root}/")
