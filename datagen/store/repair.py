"""Make a damaged run collectable again: every good row stays, what is not good becomes pending.

Of a damaged data file the good rows are copied, as they are, into a file with a new number; the journal
is written anew over the files there then are, and takes the old one's place in one rename. Only after
that go the seal, and the files nobody refers to any more. Killed anywhere, the old state or the new one
stands, and the same command goes on. The next collect recaptures the pending samples from their stored
responses, seals, and writes the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from datagen.errors import CorruptFile, RepairRefused
from datagen.store.atomic import unlink_durably
from datagen.store.files import LEADS_OUT, leading_out
from datagen.store.findings import Fault
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.plan import Plan
from datagen.store.repair_partition import PartitionRepair
from datagen.store.verify import verify_run
from datagen.store.verify_partition import PartitionCheck

IRREPLACEABLE = ("plan.arrow", "fingerprint.json")


@dataclass(slots=True)
class Repaired:
    """What was wrong, and what became of the rows of the damaged partitions, in samples."""

    faults: list[Fault]
    partitions: list[int] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    """`responses kept`, `responses lost`, `states kept`, `states lost`, `rejections reopened`."""


def repair_run(
    layout: RunLayout,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Repaired:
    """Verify, and bring every damaged partition to a state from which the collect goes on.

    The caller holds the run's lock. A sound run is left as it is. Raises VerifyFailed when no run
    is here, RepairRefused when something cannot be made anew, StorageFull.
    """
    report = verify_run(layout.root, workers=workers, progress=progress)
    done = Repaired(report.faults)
    if report.ok:
        return done
    for fault in report.faults:
        if fault.file in IRREPLACEABLE:
            raise RepairRefused(
                f"{fault.what}; every row hangs on it",
                where=layout.root / fault.file,
                fix="restore this file from a copy, or collect into a new run",
            )
    damaged = sorted({i for f in report.faults if (i := _partition_of(f)) is not None})
    for root in (layout.partition(index).root for index in damaged):
        for path in leading_out(root, layout.root) if root.is_dir() else ():
            raise RepairRefused(
                LEADS_OUT, where=path, fix="put what it leads to in its place, or remove it"
            )
    checksums = _known_checksums(layout)
    digest, plan = Fingerprint.load(layout.fingerprint).digest, Plan.open(layout.plan)
    unlink_durably(layout.manifest)
    for index in damaged:
        partition = layout.partition(index)
        if not partition.root.is_dir():
            continue  # the collect begins it anew
        planned = {(p.prompt_id, turn) for p in plan.partition(index) for turn in range(p.n_turns)}
        prefix = f"partitions/{index:05d}/"
        named = {k.removeprefix(prefix): v for k, v in checksums.items() if k.startswith(prefix)}
        done.rows += PartitionRepair(partition, digest, planned, named).run()
        done.partitions.append(index)
        left = PartitionCheck(layout, plan, digest, index, quick=False).run().faults
        if left:
            raise RepairRefused(
                f"still wrong after the repair: {left[0]}",
                where=partition.root,
                fix="remove this partition's directory to collect it again",
            )
    return done


def _partition_of(fault: Fault) -> int | None:
    parts = PurePosixPath(fault.file).parts
    named = len(parts) > 1 and parts[0] == "partitions" and parts[1].isdecimal()
    return int(parts[1]) if named else None


def _known_checksums(layout: RunLayout) -> dict[str, str]:
    """sha256 by path, from the manifest if there is one that can be read."""
    try:
        return {f.path: f.sha256 for f in Manifest.load(layout.manifest).files()}
    except CorruptFile:
        return {}
