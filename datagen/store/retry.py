"""Take rejections back: the samples are pending again, and the next collect of the run asks for them.

The order makes a kill harmless at any point: the manifest goes first, then a partition's seal, then
the tombstones are journaled in one sync. A partition whose seal alone is gone is sealed anew by the
next collect, with the same rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from datagen.errors import RetryRefused
from datagen.store.atomic import unlink_durably
from datagen.store.fingerprint import Fingerprint
from datagen.store.journal import Entry, Journal, Kind, read_journal
from datagen.store.layout import PartitionLayout, RunLayout
from datagen.store.plan import Plan
from datagen.store.rejections import Rejection, read_rejections

FOLLOWS = "earlier_turn"  # a turn that was not asked because one before it was rejected
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reopened:
    """What is pending again, in samples; `followers` are later turns of the same prompts."""

    samples: int
    followers: int
    partitions: int


def current_rejections(partition: PartitionLayout, digest: str | None) -> dict[Key, Rejection]:
    """The rejections that stand in a partition: not those that were taken back. Raises CorruptFile."""
    records = read_journal(partition.journal, digest)
    lines = read_rejections(partition.rejected, int((records["kind"] == Kind.REJECTED).sum()))
    standing: dict[Key, Rejection] = {}
    for record in records[(records["kind"] == Kind.REJECTED) | (records["kind"] == Kind.RETRY)]:
        key = (bytes(record["prompt_id"]).hex(), int(record["turn"]))
        if record["kind"] == Kind.REJECTED:
            standing[key] = next(lines)
        else:
            standing.pop(key, None)
    return standing


def retry_rejected(
    layout: RunLayout, reason: str, *, clock: Callable[[], float] = time.time
) -> Reopened:
    """Re-open every sample rejected with `reason`, and the later turns that fell with it.

    The caller holds the run's lock. Raises RetryRefused when no sample can be re-opened, naming the
    reasons there are; CorruptFile. Safe to repeat after a kill.
    """
    digest = Fingerprint.load(layout.fingerprint).digest
    n_partitions = Plan.open(layout.plan).n_partitions
    chosen: dict[int, list[Key]] = {}
    reasons: Counter[str] = Counter()
    for index in range(n_partitions):
        standing = current_rejections(layout.partition(index), digest)
        reasons.update(r.reason for r in standing.values())
        again = {k for k, r in standing.items() if r.reason == reason}
        # Causes first: should the tail be torn, a follower stays rejected, and is never orphaned.
        keys = sorted(again) + sorted(_followers(standing, again, reason))
        if keys:
            chosen[index] = keys
    if reason == FOLLOWS or not chosen:
        raise _refusal(layout, reason, reasons)
    unlink_durably(layout.manifest)
    for index, keys in chosen.items():
        partition = layout.partition(index)
        unlink_durably(partition.summary)
        journal, _ = Journal.open(partition.journal, digest)
        try:
            for prompt_id, turn in keys:
                journal.append(Entry(Kind.RETRY, prompt_id, turn, 0, 0, 0, 0, int(clock() * 1000)))
            journal.sync()
        finally:
            journal.close()
    total = sum(map(len, chosen.values()))
    return Reopened(reasons[reason], total - reasons[reason], len(chosen))


def _followers(standing: dict[Key, Rejection], again: set[Key], reason: str) -> set[Key]:
    """Turns rejected only because one before them was, with `reason`, which no longer stands.

    Their detail is `turn N: REASON`. Not by `again` alone: a kill may have left them behind.
    """
    found: set[Key] = set()
    for (prompt_id, turn), rejection in standing.items():
        cause, _, named = rejection.detail.removeprefix("turn ").partition(": ")
        if rejection.reason == FOLLOWS and named == reason and cause.isdecimal():
            key = (prompt_id, int(cause))
            if key in again or key not in standing:
                found.add((prompt_id, turn))
    return found


def _refusal(layout: RunLayout, reason: str, reasons: Counter[str]) -> RetryRefused:
    if reason == FOLLOWS and reasons[FOLLOWS]:
        what = f"'{FOLLOWS}' has no cause of its own: these turns follow a rejected one"
        reasons = Counter({r: n for r, n in reasons.items() if r != FOLLOWS})
    else:
        what = f"no sample is rejected with '{reason}'"
    listed = ", ".join(f"{r} ({n})" for r, n in reasons.most_common())
    return RetryRefused(
        what,
        where=layout.root,
        fix=f"name one of {listed}" if listed else "the run has no rejections",
    )
