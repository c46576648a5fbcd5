"""Re-read a run and hold every record against the data: nothing is taken on trust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from datagen.errors import CorruptFile, DatagenError, VerifyFailed
from datagen.store import responses as responses_format
from datagen.store.arrow_part import open_batches, sha256_of
from datagen.store.fingerprint import Fingerprint
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.partition import PartitionSummary
from datagen.store.plan import Plan
from datagen.store.rejections import read_rejections
from datagen.store.states import ShardReader

NOT_FINITE = {"BF16": 0x7F80, "F16": 0x7C00}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: file (relative to the run), row if there is one, what."""

    file: str
    row: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.row is None else f' row {self.row}'}: {self.what}"


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

    `progress(done, total)` counts partitions. Raises VerifyFailed when `root` holds no run.
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
    except DatagenError as e:
        report.faults.append(Fault(_relative(root, e.where), None, e.what))
        return report
    if plan.recomputed_digest() != plan.digest or plan.digest != fingerprint.fields.get("plan"):
        report.faults.append(
            Fault("plan.arrow", None, "its content has not the digest that the run recorded")
        )
    report.counts.update(partitions=plan.n_partitions, planned=plan.n_samples)
    with ThreadPoolExecutor(workers) as pool:
        checks = [
            pool.submit(_PartitionCheck(layout, plan, fingerprint.digest, i, quick).run)
            for i in range(plan.n_partitions)
        ]
        for done, check in enumerate(checks, start=1):
            part = check.result()
            report.counts.update(part.counts)
            report.rejected.update(part.rejected)
            report.faults += part.faults
            if progress is not None:
                progress(done, plan.n_partitions)
    if not report.partial:
        _check_manifest(layout, plan, fingerprint, report)
    return report


def _relative(root: Path, where: str | None) -> str:
    return str(where or root).removeprefix(f"{root}/")


def _check_manifest(
    layout: RunLayout, plan: Plan, fingerprint: Fingerprint, report: VerifyReport
) -> None:
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
    expect("plan digest", manifest.plan_digest, plan.digest)
    expect("samples planned", manifest.samples.planned, plan.n_samples)
    expect("samples collected", manifest.samples.collected, report.counts["collected"])
    expect("samples rejected", manifest.samples.rejected, dict(report.rejected))
    expect("samples pending", manifest.samples.pending, 0)
    listed = {f.path: (f.rows, f.tokens, f.bytes, f.sha256) for f in manifest.files()}
    sealed: dict[str, tuple[int, int, int, str]] = {}
    for index in range(plan.n_partitions):
        path = layout.partition(index).summary
        if not path.exists():
            continue
        try:
            summary = PartitionSummary.load(path)
        except CorruptFile:
            continue  # reported with its partition
        for f in [*summary.responses, *summary.states]:
            name = f"partitions/{index:05d}/{f.name}"
            sealed[name] = (f.rows, f.tokens, f.n_bytes, f.sha256)
    for name in sorted({*listed, *sealed}):
        expect(name, listed.get(name), sealed.get(name))


class _PartitionCheck:
    """Everything about one partition; collects faults instead of stopping at the first."""

    def __init__(self, layout: RunLayout, plan: Plan, digest: str, index: int, quick: bool) -> None:
        self._layout, self._run_root = layout.partition(index), layout.root
        self._plan, self._digest, self._index, self._quick = plan, digest, index, quick
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.faults: list[Fault] = []

    def run(self) -> _PartitionCheck:
        """Check; never raises for what is wrong on disk."""
        if not self._layout.root.is_dir():
            return self
        try:
            self._check()
        except DatagenError as e:
            self._fault(e.where or self._layout.root, None, e.what)
        except OSError as e:
            self._fault(e.filename or self._layout.root, None, e.strerror or repr(e))
        return self

    def _fault(self, path: str | Path, row: int | None, what: str) -> None:
        self.faults.append(Fault(_relative(self._run_root, str(path)), row, what))

    def _check(self) -> None:
        planned = {
            (p.prompt_id, t) for p in self._plan.partition(self._index) for t in range(p.n_turns)
        }
        states, responses, rejected = self._journaled(planned)
        summary = None
        if self._layout.summary.exists():
            summary = PartitionSummary.load(self._layout.summary)
            self.counts["sealed"] += 1
            self._check_seal(summary, len(states.keys() - rejected.keys()), rejected)
            missing = planned - states.keys() - rejected.keys()
            if missing:
                self._fault(
                    self._layout.summary,
                    None,
                    f"sealed, but {len(missing)} samples have no outcome",
                )
        said = self._check_responses(responses, sealed=summary is not None)
        if not self._quick:
            self._check_states(states, said, sealed=summary is not None)
        self.counts["collected"] += len(states.keys() - rejected.keys())
        self.rejected.update(rejected.values())

    def _journaled(
        self, planned: set[tuple[str, int]]
    ) -> tuple[dict[Any, int], dict[Any, int], dict[Any, str]]:
        """Files of states and of responses by sample, and reasons by rejected sample."""
        states: dict[tuple[str, int], int] = {}
        responses: dict[tuple[str, int], int] = {}
        rejected: dict[tuple[str, int], str] = {}
        reasons = read_rejections(self._layout.rejected)
        for row, record in enumerate(read_journal(self._layout.journal, self._digest)):
            key, kind = (bytes(record["prompt_id"]).hex(), int(record["turn"])), record["kind"]
            if key not in planned:
                self._fault(self._layout.journal, row, f"sample {key[0]}-{key[1]} is not planned")
            if kind == Kind.REJECTED:
                entry = next(reasons, None)
                if entry is None or entry.sample_id != f"{key[0]}-{key[1]}":
                    self._fault(self._layout.rejected, row, "does not match the journal")
                rejected[key] = entry.reason if entry else "unknown"
            elif kind == Kind.RETRY:
                rejected.pop(key, None)
            else:
                book = responses if kind == Kind.RESPONSE else states
                if key in book:
                    self._fault(self._layout.journal, row, f"sample {key[0]}-{key[1]} stands twice")
                book[key] = int(record["file"])
        return states, responses, rejected

    def _check_seal(
        self, summary: PartitionSummary, collected: int, rejected: dict[Any, str]
    ) -> None:
        where = self._layout.summary
        if summary.fingerprint != self._digest:
            self._fault(where, None, "the seal is of another fingerprint")
        if summary.collected != collected or summary.rejected != dict(Counter(rejected.values())):
            self._fault(where, None, "its counts are not those of the journal")
        stated = [(f.name, f.sha256) for f in [*summary.responses, *summary.states]]
        stated.append((self._layout.journal.name, summary.journal_sha256))
        if summary.rejections_sha256 is not None:
            stated.append((self._layout.rejected.name, summary.rejections_sha256))
        for name, sha256 in stated:
            path = self._layout.root / Path(name).name
            if not path.exists():
                self._fault(path, None, "the file is gone")
                continue
            self.counts["files"] += 1
            self.counts["bytes"] += path.stat().st_size
            if sha256_of(path) != sha256:
                self._fault(path, None, "its sha256 is not the recorded one")

    def _check_responses(
        self, journaled: dict[Any, int], *, sealed: bool
    ) -> dict[str, tuple[int, Any]]:
        """Context length and ids of every sample that has a response."""
        said: dict[str, tuple[int, Any]] = {}
        for number in self._layout.numbers("responses"):
            path = self._layout.responses(number)
            if not path.exists():
                if sealed:
                    self._fault(path, None, "an open file in a sealed partition")
                continue
            try:
                batches = open_batches(path)
            except CorruptFile as e:
                self._fault(path, None, e.what)
                continue
            for row in range(len(batches)):
                try:
                    response = responses_format.from_batch(batches[row])
                except (CorruptFile, KeyError, ValueError, AttributeError) as e:
                    self._fault(path, row, str(e))
                    continue
                key = (response.prompt_id, response.turn)
                if journaled.get(key) != number:
                    self._fault(path, row, f"sample {response.sample_id} is not journaled here")
                if not len(response.context_ids) or not len(response.response_ids):
                    self._fault(path, row, "empty context or response")
                ids = np.concatenate([response.context_ids, response.response_ids])
                said[response.sample_id] = (len(response.context_ids), ids)
        return said

    def _check_states(
        self, journaled: dict[Any, int], said: dict[str, tuple[int, Any]], *, sealed: bool
    ) -> None:
        seen: set[str] = set()
        for number in self._layout.numbers("states"):
            path = self._layout.states(number)
            if not path.exists():
                if sealed:
                    self._fault(path, None, "an open shard in a sealed partition")
                continue
            try:
                shard = ShardReader(path)
            except CorruptFile as e:
                self._fault(path, None, e.what)
                continue
            for row in range(len(shard)):
                try:
                    self._check_sample(shard, path, row, number, journaled, said, seen)
                except CorruptFile as e:
                    self._fault(path, row, e.what)
        if sealed:
            for prompt_id, turn in journaled:
                if f"{prompt_id}-{turn}" not in seen:
                    self._fault(
                        self._layout.journal, None, f"no shard holds sample {prompt_id}-{turn}"
                    )

    def _check_sample(
        self, shard: ShardReader, path: Path, row: int, number: int,
        journaled: dict[Any, int], said: dict[str, tuple[int, Any]], seen: set[str],
    ) -> None:  # fmt: skip
        columns = shard.columns(row)
        sample_id = columns.sample_id
        prompt_id, _, turn = sample_id.rpartition("-")
        if prompt_id != columns.prompt_id or not turn.isdecimal():
            self._fault(path, row, f"sample {sample_id} is not of prompt {columns.prompt_id}")
            return
        if journaled.get((prompt_id, int(turn))) != number:
            self._fault(path, row, f"sample {sample_id} is not journaled in this shard")
        if sample_id in seen:
            self._fault(path, row, f"sample {sample_id} stands twice")
        seen.add(sample_id)
        n_tokens, mask = columns.n_tokens, columns.loss_mask
        if not len(columns.input_ids) == len(mask) == n_tokens:
            self._fault(
                path, row, f"{len(columns.input_ids)} ids, {len(mask)} of mask, {n_tokens} tokens"
            )
            return
        n_context, ids = said.get(sample_id, (0, None))
        if ids is None or not np.array_equal(ids, columns.input_ids):
            self._fault(path, row, "its ids are not context + response as generated")
        elif not np.array_equal(mask, np.arange(n_tokens) >= n_context):
            self._fault(path, row, "its mask is not 0 over the context and 1 over the response")
        states_TLH = shard.states(row)
        if len(states_TLH) != n_tokens:
            self._fault(path, row, f"{len(states_TLH)} rows for {n_tokens} tokens")
        limit = NOT_FINITE[shard.spec.dtype]
        for layer in range(shard.spec.n_layers):
            bits_TH = states_TLH[:, layer]
            if ((bits_TH & limit) == limit).any():
                self._fault(path, row, f"layer {layer} holds NaN or infinity")
            if not (bits_TH & 0x7FFF).any():
                self._fault(path, row, f"layer {layer} is all zero")
            elif n_tokens > 1 and (bits_TH == bits_TH[:1]).all():
                self._fault(path, row, f"layer {layer} is the same for every token")
        self.counts["tokens"] += n_tokens
        self.counts["supervised"] += int(mask.sum())
