"""How far a run is, read from its journals alone; safe beside a live writer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datagen.errors import VerifyFailed
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import RunLayout
from datagen.store.plan import Plan
from datagen.store.rejections import read_rejections


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Counts in samples, as the disk holds them now."""

    planned: int
    responded: int
    collected: int
    rejected: dict[str, int]
    partitions: int
    partitions_sealed: int
    stored_bytes: int
    complete: bool

    @property
    def pending(self) -> int:
        """Samples without a final outcome."""
        return self.planned - self.collected - sum(self.rejected.values())

    def table_rows(self) -> list[tuple[str, str]]:
        """Rows for a table."""
        rejects = ", ".join(f"{n} {r}" for r, n in sorted(self.rejected.items())) or "none"
        return [
            ("state", "complete" if self.complete else "in progress, or stopped"),
            ("partitions", f"{self.partitions_sealed:,} sealed of {self.partitions:,}"),
            ("samples planned", f"{self.planned:,}"),
            ("with a response", f"{self.responded:,}"),
            ("collected", f"{self.collected:,}"),
            ("rejected", rejects),
            ("pending", f"{self.pending:,}"),
            ("stored", f"{self.stored_bytes / 1e6:,.1f} MB"),
        ]


def run_status(root: Path) -> RunStatus:
    """Read the counts of a run directory. Raises VerifyFailed when no run is there."""
    layout = RunLayout(root)
    if not layout.plan.exists():
        raise VerifyFailed("no run is here", where=root, fix="start one: `make shards`")
    plan = Plan.open(layout.plan)
    responded = collected = sealed = stored = 0
    rejected: Counter[str] = Counter()
    for index in range(plan.n_partitions):
        partition = layout.partition(index)
        if not partition.root.is_dir():
            continue
        sealed += partition.summary.exists()
        stored += sum(_size(f) for f in partition.root.glob("states-*"))
        records = read_journal(partition.journal)
        kinds = np.bincount(records["kind"], minlength=5)
        responded += int(kinds[Kind.RESPONSE])
        collected += int(kinds[Kind.STATES])
        retried = Counter(
            f"{bytes(r['prompt_id']).hex()}-{r['turn']}"
            for r in records[records["kind"] == Kind.RETRY]
        )
        for entry in read_rejections(partition.rejected, int(kinds[Kind.REJECTED])):
            if retried[entry.sample_id]:
                retried[entry.sample_id] -= 1
            else:
                rejected[entry.reason] += 1
    return RunStatus(
        planned=plan.n_samples,
        responded=responded,
        collected=collected,
        rejected=dict(rejected),
        partitions=plan.n_partitions,
        partitions_sealed=sealed,
        stored_bytes=stored,
        complete=layout.manifest.exists(),
    )


def _size(path: Path) -> int:
    """Bytes of a file; 0 when a live writer has renamed it since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
