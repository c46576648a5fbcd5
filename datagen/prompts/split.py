"""Train and held-out: disjoint by construction, in an order of its own, in partitions of one split."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datagen.errors import PromptDataError
from datagen.prompts.identity import below, draw
from datagen.prompts.mix import Mix
from datagen.prompts.population import I64, Population


def held_out_rows(mix: Mix, population: Population, rows: I64) -> npt.NDArray[np.bool_]:
    """True for the selected candidates that are held out: of held-out sources, or by their hash.

    The hash depends on the content and the mix's seed: a prompt that is held out stays so when
    the mix grows.
    """
    of_source = population.rank[rows] < len(mix.heldout.sources)
    by_hash = below(draw(population.first_8[rows], "split", mix.seed), mix.heldout.hash_share)
    return of_source | by_hash


def plan_order(population: Population, rows: I64, heldout: npt.NDArray[np.bool_], seed: int) -> I64:
    """Positions in `rows`, held-out prompts first, each split shuffled by the hash of the content."""
    shuffle = draw(population.first_8[rows], "order", seed)
    return np.lexsort((shuffle, ~heldout))


def partition_numbers(heldout: npt.NDArray[np.bool_], partition_prompts: int) -> I64:
    """Partition of each prompt in plan order: blocks of `partition_prompts`, one split each."""
    n_heldout = int(heldout.sum())
    first = np.arange(n_heldout) // partition_prompts
    used = int(first[-1]) + 1 if n_heldout else 0
    rest = np.arange(len(heldout) - n_heldout) // partition_prompts
    return np.concatenate([first, rest + used]).astype(np.int64)


def require_disjoint(train: Iterable[str], heldout: Iterable[str], where: str | Path) -> None:
    """Raises PromptDataError when a prompt id is in both sets: what was trained on measures nothing."""
    both = sorted(set(train) & set(heldout))
    if both:
        raise PromptDataError(
            f"{len(both):,} held-out prompts were trained on, {both[0]} among them",
            where=where,
            fix="evaluate on prompts of another plan, or train without them",
        )
