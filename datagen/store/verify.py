"""Re-read a run and hold every record against the data: nothing is taken on trust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from datagen.errors import CorruptFile, DatagenError, LimitReached, VerifyFailed
from datagen.store.findings import Fault as Fault
from datagen.store.findings import relative_to
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest, merge_seals
from datagen.store.plan import Plan
from datagen.store.states import StatesSpec
from datagen.store.threads import usable_cpus
from datagen.store.verify_partition import PartitionCheck


@dataclass(slots=True)
class VerifyReport:
    """The outcome. `counts` are of what was really read."""

    root: Path
    quick: bool
    counts: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    partial: bool = False

    @property
    def ok(self) -> bool:
        """True when nothing is wrong; a partial run can be."""
        return not self.faults

    def table_rows(self) -> list[tuple[str, str]]:
        """Rows for a table."""
        c = self.counts
        rejects = ", ".join(f"{n} {r}" for r, n in sorted(self.rejected.items())) or "none"
        pending = c["planned"] - c["collected"] - self.rejected.total()
        return [
            ("run", "partial: no manifest yet" if self.partial else "complete"),
            ("partitions", f"{c['sealed']:,} sealed of {c['partitions']:,}"),
            ("samples planned", f"{c['planned']:,}"),
            ("samples collected", f"{c['collected']:,}"),
            ("samples rejected", rejects),
            ("samples pending", f"{pending:,}"),
            ("files checked", f"{c['files']:,} ({c['bytes'] / 1e6:,.1f} MB)"),
            ("tokens with states", "not read (--quick)" if self.quick else f"{c['tokens']:,}"),
            ("supervised tokens", "not read (--quick)" if self.quick else f"{c['supervised']:,}"),
            ("faults", f"{len(self.faults):,}"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for machines."""
        return {
            "root": str(self.root),
            "ok": self.ok,
            "partial": self.partial,
            "quick": self.quick,
            "counts": dict(self.counts),
            "rejected": dict(self.rejected),
            "faults": [asdict(f) for f in self.faults],
        }


def verify_run(
    root: Path,
    *,
    quick: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check a run, complete or partial. `quick`: checksums and records, states are not decoded.

    Partitions are checked by `workers` threads at once, one a core by default: hashing, inflating
    and comparing leave the interpreter. `progress(done, total)` counts partitions, from this
    thread. The report does not depend on the order. Raises VerifyFailed when `root` holds no run,
    LimitReached.
    """
    layout = RunLayout(root)
    if not layout.plan.exists() or not layout.fingerprint.exists():
        raise VerifyFailed(
            "no run is here: plan.arrow or fingerprint.json is absent",
            where=root,
            fix="name a run directory that a collect has started",
        )
    report = VerifyReport(root, quick, partial=not layout.manifest.exists())
    try:
        fingerprint = Fingerprint.load(layout.fingerprint)
        plan = Plan.open(layout.plan)
        if plan.recomputed_digest() != plan.digest:
            raise CorruptFile("its content has not the digest it states", where=layout.plan)
        if plan.digest != fingerprint.fields.get("plan"):
            raise CorruptFile("it is not the plan of the fingerprint", where=layout.plan)
    except LimitReached:
        raise
    except DatagenError as e:
        report.faults.append(Fault(relative_to(root, e.where or root), None, e.what))
        return report
    report.counts.update(partitions=plan.n_partitions, planned=plan.n_samples)
    specs: set[StatesSpec] = set()
    with ThreadPoolExecutor(workers or usable_cpus()) as pool:
        checks = [
            pool.submit(PartitionCheck(layout, plan, fingerprint.digest, i, quick=quick).run)
            for i in range(plan.n_partitions)
        ]
        try:
            for done, _ in enumerate(as_completed(checks), start=1):
                if progress is not None:
                    progress(done, plan.n_partitions)
        finally:  # an interrupt does not wait for what has not begun
            pool.shutdown(wait=False, cancel_futures=True)
    for check in checks:
        part = check.result()
        report.counts.update(part.counts)
        report.rejected.update(part.rejected)
        report.faults += part.faults
        specs |= part.specs
    if len(specs) > 1:
        report.faults.append(Fault("partitions", None, f"shards of {len(specs)} kinds: {specs}"))
    if not report.partial:
        _check_manifest(layout, plan, fingerprint, specs, report)
    return report


def _check_manifest(
    layout: RunLayout,
    plan: Plan,
    fingerprint: Fingerprint,
    specs: set[StatesSpec],
    report: VerifyReport,
) -> None:
    root = layout.root
    try:
        manifest = Manifest.load(layout.manifest)
    except CorruptFile as e:
        report.faults.append(Fault("manifest.json", None, e.what))
        return

    def expect(what: str, stated: object, found: object) -> None:
        if stated != found:
            report.faults.append(
                Fault("manifest.json", None, f"{what}: states {stated}, found {found}")
            )

    expect("fingerprint", manifest.fingerprint, fingerprint.digest)
    for name in ("target", "settings"):
        of_run, stated = fingerprint.fields.get(name), getattr(manifest, name)
        for key, value in of_run.items() if isinstance(of_run, dict) else ():
            expect(f"{name}.{key}", stated.get(key), value)
    expect("samples.pending", manifest.samples.pending, 0)
    described = manifest.states.model_dump()
    for spec in specs:
        for name, value in asdict(spec).items():
            found = list(value) if isinstance(value, tuple) else value
            expect(f"states.{name}", described[name], found)
    try:
        made = merge_seals(layout, plan, manifest, manifest.created)
    except LimitReached:
        raise
    except (DatagenError, ValidationError) as e:
        where = e.where if isinstance(e, DatagenError) else None
        what = e.what if isinstance(e, DatagenError) else f"cannot be made anew: {e.errors()[0]}"
        report.faults.append(Fault(relative_to(root, where or layout.manifest), None, what))
        return
    stated_fields, made_fields = (Fingerprint(m.model_dump(mode="json")) for m in (manifest, made))
    for name, (stated_value, found_value) in stated_fields.differences(made_fields).items():
        expect(name, _short(stated_value), _short(found_value))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({sha256(text.encode()).hexdigest()[:8]})"
