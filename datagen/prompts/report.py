"""What became of every row that a plan looked at, for people and for the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from datagen.prompts.intake import Intake

UNROUTED = "(unreadable rows)"


@dataclass(slots=True)
class PlanReport:
    """The books of a plan: lines = planned + unused + dropped + blank + unclaimed, all told.

    planned    prompts in the plan, by source
    unused     usable prompts beyond what the mix asks for, by source
    dropped    by source and reason; `samples` has up to three places of each, `removed_by` counts
               contaminated prompts by the held-out set that they were found in
    notes      what was repaired, and how often
    digests    sha256 over the sorted prompt ids of each split; no id is in both
    """

    mix: str
    lines: int = 0
    blank: int = 0
    unclaimed: int = 0
    planned: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = field(default_factory=dict)
    samples: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    removed_by: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    tokens_counted_with: str = ""
    messages: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Prompts in the plan."""
        return sum(self.planned.values())

    @property
    def n_dropped(self) -> int:
        """Rows dropped, for all reasons."""
        return sum(sum(reasons.values()) for reasons in self.dropped.values())

    def reasons(self) -> Counter[str]:
        """Dropped rows by reason, over all sources."""
        total: Counter[str] = Counter()
        for reasons in self.dropped.values():
            total += reasons
        return total

    def is_balanced(self) -> bool:
        """True when every line is accounted for."""
        rest = self.n_dropped + self.blank + self.unclaimed
        return self.lines == self.accepted + sum(self.unused.values()) + rest

    def enter_intakes(self, intakes: Iterable[Intake]) -> None:
        """Take over the books of the files."""
        for intake in intakes:
            counts = intake.counts
            self.lines += counts.lines
            self.blank += counts.blank
            self.unclaimed += counts.unclaimed
            self.notes += counts.notes
            for source, reasons in counts.dropped.items():
                self.dropped.setdefault(source or UNROUTED, Counter()).update(reasons)
            for source, told in counts.samples.items():
                mine = self.samples.setdefault(source or UNROUTED, {})
                for reason, places in told.items():
                    mine[reason] = [*mine.get(reason, []), *places][:3]

    def drop(self, source: str, reason: str, count: int = 1) -> None:
        """Enter candidates that a comparison or a limit took out."""
        if count:
            self.dropped.setdefault(source, Counter())[reason] += count

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return plain | {"accepted": self.accepted, "balanced": self.is_balanced()}
