"""From a mix to the frozen list of prompts of a run.

    read -> normalise -> decontaminate -> deduplicate -> select -> count tokens -> split -> order

The result depends on the mix, the content of its data, the tokenizer and the seed: not on the order
of files or rows in them, not on the number of workers, not on what the cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datagen.prompts.cache import default_cache
from datagen.prompts.identity import below, draw
from datagen.prompts.intake import (
    Intake,
    OnStep,
    readings_of,
    take_in_reading,
    worker_pool,
)
from datagen.prompts.mix import Mix, Source
from datagen.prompts.planned import PlannedRows
from datagen.prompts.population import gather
from datagen.prompts.report import PlanReport
from datagen.prompts.screen import distinct, heldout_sets
from datagen.prompts.select import take
from datagen.prompts.split import held_out_rows, partition_numbers, plan_order
from datagen.prompts.tokens import Fit, TokenCounter, TokenLedger
from datagen.target.profile import Profile


@dataclass(frozen=True, slots=True)
class PlanResult:
    """`rows` in plan order (iterate as often as needed, read from the cache), and the books."""

    rows: PlannedRows
    report: PlanReport


def build_plan(
    mix: Mix,
    *,
    renderer: TokenCounter,
    profile: Profile,
    limit: int | None = None,
    seed: int = 0,
    max_new_tokens: int | None = None,
    partition_prompts: int = 25,
    progress: Callable[[str], None] | None = None,
    on_step: OnStep | None = None,
    cache: Path | None = None,
    workers: int = 1,
) -> PlanResult:
    """The plan of a run. Raises MixError and PromptDataError, each in one line.

    limit              about this many prompts, in the mix's proportions, of both splits
    max_new_tokens     tokens an answer may have; None is the profile's
    progress, on_step  told what has been done, in words, and how far a step has come
    cache              where steps are remembered; None is the user's cache directory
    workers            processes that read; the plan does not depend on it
    """
    say = progress or (lambda _: None)
    step = on_step or (lambda _stage, _done, _total: None)
    folder = default_cache() if cache is None else cache
    report = PlanReport(mix.name, tokens_counted_with=renderer.digest)
    answer = max_new_tokens or profile.max_new_tokens
    answers = [min(s.max_new_tokens or answer, answer) for s in mix.all_sources]
    with worker_pool(workers) as pool:
        held_intakes = _read(mix, mix.heldout.sources, folder, pool, step)
        intakes = [*held_intakes, *_read(mix, mix.sources, folder, pool, step)]
        report.enter_intakes(intakes)
        say(f"read {report.lines:,} rows")
        population = gather(mix, intakes)
        sets = heldout_sets(mix, held_intakes, folder, pool, step)
        usable = distinct(mix, population, sets, folder, pool, step, report)
        say(f"{int(usable.sum()):,} distinct prompts, none of them held out")
    choice = seed + (mix.seed << 32)
    thinking = None
    if mix.thinking is not None and profile.thinking_kwarg is not None:
        thinking = below(draw(population.first_8, "thinking", mix.seed), mix.thinking.on_share)
    ledger = TokenLedger(
        population, renderer, thinking, [mix.thinking and mix.thinking.on_share, mix.seed]
    )
    try:
        takings = take(
            mix,
            population,
            usable,
            draw(population.first_8, "select", choice),
            limit,
            Fit(mix, profile, population, ledger, answers),
            report,
            lambda name, n: step(f"select {name}", n, None),
        )
    finally:  # what was counted is not counted again after an interrupt
        ledger.save()
    rows = np.array([r for t in takings for r in t.taken], dtype=np.int64)
    tokens = np.array([n for t in takings for n in t.tokens], dtype=np.int32)
    for taking in takings:
        report.planned[taking.source.name] += len(taking.taken)
    held = held_out_rows(mix, population, rows)
    order = plan_order(population, rows, held, choice)
    planned = PlannedRows(
        mix=mix,
        population=population,
        rows=rows[order],
        tokens=tokens[order],
        heldout=held[order],
        partitions=partition_numbers(held[order], partition_prompts),
        thinking=None if thinking is None else thinking[rows[order]],
        answers=answers,
    )
    planned.enter_splits(report)
    say(f"planned {report.accepted:,} prompts")
    return PlanResult(planned, report)


def _read(
    mix: Mix, sources: tuple[Source, ...], cache: Path, pool: Executor | None, on_step: OnStep
) -> list[Intake]:
    """Some sources of the mix; an origin that several share is read once."""
    return [
        intake
        for reading in readings_of(mix, sources)
        for intake in take_in_reading(
            reading, mix.files_of(reading.sources[0]), cache, pool, on_step
        )
    ]
