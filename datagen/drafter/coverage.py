"""What share of the supervised tokens a draft vocabulary covers, by prompt source and language."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datagen.drafter.dataset import SampleRef, StatesSource
from datagen.drafter.vocab import Coverage, DraftVocab
from datagen.store.layout import RunLayout
from datagen.store.plan import Plan

ALL = "all"


def coverage(
    sources: Sequence[StatesSource], refs: Sequence[SampleRef], vocab: DraftVocab
) -> dict[str, float]:
    """`all`, `source:<name>` and `language:<code>` -> share of supervised tokens inside the map.

    Sources and languages come from the plan beside each manifest; a run moved without its plan has
    `all` alone.
    """
    groups = [_groups(Path(s.info.path)) for s in sources]
    counted = Coverage.of(vocab)
    for ref in refs:
        ids, mask = sources[ref.source].ids(ref)
        supervised = ids[np.asarray(mask) == 1]
        for name in (ALL, *groups[ref.source].get(ref.prompt_id, ())):
            counted.add(name, supervised)
    return counted.shares()


def _groups(manifest: Path) -> dict[str, tuple[str, ...]]:
    """prompt_id -> the groups it is counted in besides `all`."""
    path = RunLayout(manifest.parent).plan
    if not path.exists():
        return {}
    plan = Plan.open(path)
    found: dict[str, tuple[str, ...]] = {}
    for number in range(plan.n_partitions):
        for prompt in plan.partition(number):
            language = prompt.language or "unknown"
            found[prompt.prompt_id] = (f"source:{prompt.source}", f"language:{language}")
    return found


def coverage_line(shares: dict[str, float], most: int = 6) -> str:
    """The whole, and the groups that are covered worst."""
    worst = sorted((v, k) for k, v in shares.items() if k != ALL)[:most]
    listed = ", ".join(f"{name} {100 * share:.1f} %" for share, name in worst)
    return (
        f"draft vocabulary covers {100 * shares.get(ALL, 0.0):.1f} % of the supervised tokens"
        + (f"; least: {listed}" if listed else "")
    )
