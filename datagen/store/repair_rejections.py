"""The rejections of a damaged partition: those that can be believed stay, the others are taken back."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile
from datagen.store.arrow_part import sha256_of
from datagen.store.atomic import write_atomic
from datagen.store.files import read_bytes
from datagen.store.journal import Entry, Kind
from datagen.store.layout import PartitionLayout
from datagen.store.rejections import (
    Rejection,
    parse_rejection,
    read_rejections,
    rejection_line,
)
from datagen.store.seal import PartitionSummary

Key = tuple[str, int]


def repaired_rejections(
    layout: PartitionLayout,
    records: NDArray[np.void] | None,
    seal: PartitionSummary | None,
    *,
    responded: set[Key],
    collected: set[Key],
) -> tuple[list[Entry], int]:
    """The journal's entries for rejections, and how many were taken back.

    `records`: the old journal's, None when it is lost. `responded`, `collected`: samples whose rows
    are good. rejected.jsonl is written anew only when it cannot stay as it is.
    """
    lines_are_good = _unchanged(layout, seal)
    if records is not None and lines_are_good and _agree(layout, records):
        return _as_they_are(records, responded)
    standing = _believable(layout, records, seal, collected, lines_are_good=lines_are_good)
    promised = sum(seal.rejected.values()) if seal else _count(records)
    content, entries = b"", []
    for (prompt_id, turn), rejection in standing.items():
        content += rejection_line(rejection)
        entries.append(
            Entry(Kind.REJECTED, prompt_id, turn, 0, len(content), 0, rejection.attempts, 0)
        )
    if content or layout.rejected.exists():
        write_atomic(layout.rejected, content)
    return entries, max(0, promised - len(standing))


def _count(records: NDArray[np.void] | None) -> int:
    return 0 if records is None else int((records["kind"] == Kind.REJECTED).sum())


def _unchanged(layout: PartitionLayout, seal: PartitionSummary | None) -> bool:
    """True when the file is what the seal says; without a seal nothing speaks against it."""
    if seal is None:
        return True
    found = sha256_of(layout.rejected) if layout.rejected.exists() else None
    return found == seal.rejections_sha256


def _agree(layout: PartitionLayout, records: NDArray[np.void]) -> bool:
    """True when every rejection of the journal has its line."""
    rejected = records[records["kind"] == Kind.REJECTED]
    try:
        lines = list(read_rejections(layout.rejected, len(rejected)))
    except CorruptFile:
        return False
    named = [f"{bytes(r['prompt_id']).hex()}-{r['turn']}" for r in rejected]
    return [line.sample_id for line in lines] == named


def _as_they_are(records: NDArray[np.void], responded: set[Key]) -> tuple[list[Entry], int]:
    """The same records; samples whose response is lost are asked for again, so theirs are taken back."""
    entries: list[Entry] = []
    had: set[Key] = set()
    standing: dict[Key, int] = {}
    for r in records:
        key, kind = (bytes(r["prompt_id"]).hex(), int(r["turn"])), Kind(r["kind"])
        if kind is Kind.RESPONSE:
            had.add(key)
        elif kind in (Kind.REJECTED, Kind.RETRY):
            end, attempts, time_ms = (int(r[n]) for n in ("end", "attempts", "time_ms"))
            entries.append(Entry(kind, *key, 0, end, 0, attempts, time_ms))
            if kind is Kind.REJECTED:
                standing[key] = time_ms
            else:
                standing.pop(key, None)
    back = [key for key in standing if key in had and key not in responded]
    entries += [Entry(Kind.RETRY, *key, 0, 0, 0, 0, standing[key]) for key in back]
    return entries, len(back)


def _believable(
    layout: PartitionLayout,
    records: NDArray[np.void] | None,
    seal: PartitionSummary | None,
    collected: set[Key],
    *,
    lines_are_good: bool,
) -> dict[Key, Rejection]:
    """Rejections to keep, when journal and lines do not agree; all of a prompt, or none of it."""
    found: dict[Key, Rejection] = {}
    bad: set[str] = set()
    raw = read_bytes(layout.rejected).splitlines(keepends=True) if layout.rejected.exists() else []
    for number, line in enumerate(raw, start=1):
        try:
            rejection = parse_rejection(layout.rejected, number, line)
        except CorruptFile:
            continue
        prompt_id, _, turn = rejection.sample_id.rpartition("-")
        if turn.isdecimal() and (prompt_id, int(turn)) not in collected:
            found[prompt_id, int(turn)] = rejection
    if lines_are_good and seal is not None:
        counted = Counter(r.reason for r in found.values())
        return found if counted == Counter(seal.rejected) else {}
    if records is None:
        return {}
    attempts = {}
    for r in records:
        key = (bytes(r["prompt_id"]).hex(), int(r["turn"]))
        if r["kind"] == Kind.REJECTED:
            attempts[key] = int(r["attempts"])
        elif r["kind"] == Kind.RETRY:
            attempts.pop(key, None)
    for key, tries in attempts.items():
        stated = found.get(key)
        believed = stated is not None and stated.attempts == tries
        if not believed or (seal and stated and stated.reason not in seal.rejected):
            bad.add(key[0])
    return {k: r for k, r in found.items() if k in attempts and k[0] not in bad}
