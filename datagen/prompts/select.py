"""Which of the usable candidates a plan takes: counts, caps, token limits, and a run's own limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from datagen.errors import MixError
from datagen.prompts.mix import Mix, Source
from datagen.prompts.population import I64, Population
from datagen.prompts.report import PlanReport

Measure = Callable[[I64], tuple[npt.NDArray[np.int32], list[str | None]]]
"""Prompt tokens of candidates, and per candidate the reason why it cannot be asked, or None."""
BLOCK = 32_768


def largest_remainder(weights: list[int], total: int) -> list[int]:
    """Whole shares of `total` in proportion to `weights`; ties go to the earlier."""
    whole = sum(weights)
    if whole == 0:
        return [0] * len(weights)
    shares = [w * total // whole for w in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(weights[i] * total % whole), i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares


def quotas(mix: Mix, limit: int | None) -> list[int]:
    """How many prompts to take of each of `mix.all_sources`.

    Without a limit that bites: the counts. With one: the same proportions, but of the held-out
    sources at least the mix's `limit_share` together, as far as their counts go.
    """
    counts = [s.count for s in mix.all_sources]
    if limit is None or limit >= mix.total:
        return counts
    n_heldout = len(mix.heldout.sources)
    heldout, train = counts[:n_heldout], counts[n_heldout:]
    wanted = max(limit * sum(heldout) // mix.total, round(limit * mix.heldout.limit_share))
    held = max(min(wanted, sum(heldout)), limit - sum(train))
    return largest_remainder(heldout, held) + largest_remainder(train, limit - held)


@dataclass(slots=True)
class Taking:
    """One source being taken from, in the order of its draws."""

    source: Source
    rank: int
    rows: I64
    cap_values: list[str | None] | None
    cap: int
    quota: int
    taken: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    position: int = 0
    per_value: Counter[str | None] = field(default_factory=Counter)

    @property
    def is_exhausted(self) -> bool:
        """True when no candidate is left to look at."""
        return self.position >= len(self.rows)

    def fill(self, measure: Measure, report: PlanReport) -> None:
        """Take candidates until the quota is met or none is left."""
        while len(self.taken) < self.quota and not self.is_exhausted:
            need = self.quota - len(self.taken)
            block = min(BLOCK, max(64, need + need // 8), len(self.rows) - self.position)
            looked_at = np.arange(self.position, self.position + block)
            allowed = [i for i in looked_at if self._under_cap(int(i))]
            counts, reasons = measure(self.rows[allowed])
            known = {
                int(i): (int(n), why) for i, n, why in zip(allowed, counts, reasons, strict=True)
            }
            for i in map(int, looked_at):
                if len(self.taken) == self.quota:
                    return
                self.position = i + 1
                if i not in known or not self._under_cap(i):
                    report.drop(self.source.name, "over_cap")
                    continue
                n_tokens, why = known[i]
                if why is not None:
                    report.drop(self.source.name, why)
                    continue
                self.taken.append(int(self.rows[i]))
                self.tokens.append(n_tokens)
                if self.cap_values is not None:
                    self.per_value[self.cap_values[i]] += 1

    def _under_cap(self, i: int) -> bool:
        return self.cap_values is None or self.per_value[self.cap_values[i]] < self.cap


def take(
    mix: Mix,
    population: Population,
    usable: npt.NDArray[np.bool_],
    order: npt.NDArray[np.uint64],
    limit: int | None,
    measure: Measure,
    report: PlanReport,
    on_source: Callable[[str, int], None],
) -> list[Taking]:
    """Take every source's prompts, smallest `order` first. Raises MixError when a source is short.

    `usable`, `order`: [n] over the population.
    """
    takings: list[Taking] = []
    for rank, (source, quota) in enumerate(zip(mix.all_sources, quotas(mix, limit), strict=True)):
        rows = np.flatnonzero(usable & (population.rank == rank))
        rows = rows[np.argsort(order[rows], kind="stable")]
        caps = None
        if source.cap_by is not None:
            caps = [row["cap"] for row in population.take(rows, "cap")]
        share = source.cap_by.max_share if source.cap_by else 1.0
        taking = Taking(source, rank, rows, caps, max(1, int(share * quota)), quota)
        takings.append(taking)
        taking.fill(measure, report)
        on_source(source.name, len(taking.taken))
        if len(taking.taken) < quota and mix.on_short_source == "fail":
            raise _short(mix, taking, report)
    n_heldout = len(mix.heldout.sources)
    _make_up(takings[:n_heldout], measure, report)
    _make_up(takings[n_heldout:], measure, report)
    for taking in takings:
        report.unused[taking.source.name] += len(taking.rows) - taking.position
    return takings


def _make_up(takings: list[Taking], measure: Measure, report: PlanReport) -> None:
    """Have the other sources give what short ones lack, in proportion to their counts."""
    while missing := sum(t.quota - len(t.taken) for t in takings):
        for taking in takings:
            if len(taking.taken) < taking.quota:
                report.messages.append(
                    f"source '{taking.source.name}' gave {len(taking.taken):,} "
                    f"of {taking.quota:,} prompts"
                )
                taking.quota = len(taking.taken)
        open_ones = [t for t in takings if not t.is_exhausted]
        if not open_ones:
            report.messages.append(f"no source is left for {missing:,} missing prompts")
            return
        for taking, more in zip(
            open_ones, largest_remainder([t.source.count for t in open_ones], missing), strict=True
        ):
            taking.quota += more
            taking.fill(measure, report)


def _short(mix: Mix, taking: Taking, report: PlanReport) -> MixError:
    name = taking.source.name
    lost = ", ".join(f"{r} {n:,}" for r, n in report.dropped.get(name, Counter()).most_common(4))
    return MixError(
        f"source '{name}' has {len(taking.taken):,} usable prompts, its count asks for "
        f"{taking.quota:,}" + (f" (dropped: {lost})" if lost else ""),
        where=mix.path,
        fix="lower its count and the total, or set `on_short_source: rescale`",
    )
