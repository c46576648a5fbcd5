"""What may be trained on: no held-out prompt, and nothing twice."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datagen.prompts.candidates import Chunk
from datagen.prompts.contamination import NO_SET, build_index
from datagen.prompts.dedup import later_copies, near_copies
from datagen.prompts.intake import Intake, OnStep, Reading, take_in_file
from datagen.prompts.marks import mark_all, sets_of
from datagen.prompts.mix import Limits, Mix, Source
from datagen.prompts.population import Population
from datagen.prompts.report import PlanReport

ANY_LENGTH = Limits(min_chars=0, max_turns=1_000_000)


def heldout_sets(
    mix: Mix, own: list[Intake], cache: Path, pool: Executor | None, on_step: OnStep
) -> dict[str, list[Chunk]]:
    """The chunks of every held-out set: the mix's own sources, and those it names."""
    sets: dict[str, list[Chunk]] = {}
    for intake in own:
        name = " ".join(source.name for source in intake.sources)
        sets.setdefault(name, []).extend(intake.chunks)
    for name, path in mix.heldout_sets().items():
        reading = Reading((Source(name=name, file=name, licence="any", count=1),), (ANY_LENGTH,))
        sets.setdefault(name, []).extend(take_in_file(path, reading, cache, pool, on_step).chunks)
    return sets


def distinct(
    mix: Mix,
    population: Population,
    sets: dict[str, list[Chunk]],
    cache: Path,
    pool: Executor | None,
    on_step: OnStep,
    report: PlanReport,
) -> npt.NDArray[np.bool_]:
    """True for the candidates that contain no held-out prompt and repeat no other.

    The rest is entered into the books: first what is contaminated, then exact, then near copies.
    """
    near, rule = mix.dedup.near, mix.decontaminate
    index = build_index(list(sets.values()), rule)
    jobs = mark_all(population, near, rule, index, cache, pool, on_step)
    is_training = population.rank >= len(mix.heldout.sources)
    found_in = sets_of(population, jobs)
    usable = ~is_training | (found_in == NO_SET)
    for number, name in enumerate(sets):
        contaminated = is_training & (found_in == number)
        _enter(mix, population, contaminated, f"contaminated:{name}", report)
        report.removed_by[name] += int(contaminated.sum())
    copies = later_copies(population.exact_key, usable)
    _enter(mix, population, copies, "exact_duplicate", report)
    usable &= ~copies
    if near is not None:
        on_step("find near duplicates", 0, None)
        compared = np.array([source.near_dedup for source in mix.all_sources])[population.rank]
        copies = near_copies(population, jobs, near, usable & compared)
        _enter(mix, population, copies, "near_duplicate", report)
        usable &= ~copies
    return np.asarray(usable)


def _enter(
    mix: Mix,
    population: Population,
    dropped: npt.NDArray[np.bool_],
    reason: str,
    report: PlanReport,
) -> None:
    counts = np.bincount(population.rank[dropped], minlength=len(mix.all_sources))
    for source, count in zip(mix.all_sources, counts, strict=True):
        report.drop(source.name, reason, int(count))
