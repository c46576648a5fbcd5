"""Which candidates stay when several say the same. Earlier ones in canonical order stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from datagen.prompts.marks import MarkJob, sketches_of
from datagen.prompts.minhash import near_duplicates
from datagen.prompts.mix import Near
from datagen.prompts.population import I64, Population
from datagen.prompts.words import WordHashes


def later_copies(
    keys: npt.NDArray[np.uint64], among: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """True for every element of `among` whose key equals that of one before it, [n]."""
    rows = np.flatnonzero(among)
    copies = np.zeros(len(keys), dtype=np.bool_)
    copies[rows] = True
    copies[rows[np.unique(keys[rows], return_index=True)[1]]] = False
    return copies


def near_copies(
    population: Population, jobs: Sequence[MarkJob], near: Near, among: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """True for every candidate of `among` that is a near duplicate of one that stays, [n]."""

    def words_of(rows: I64) -> WordHashes:
        return gather_words(population, rows)

    return near_duplicates(sketches_of(population, jobs, near), near, words_of, among)


def gather_words(population: Population, rows: I64) -> WordHashes:
    """The words of some candidates, in the order of `rows`; one chunk in memory at a time."""
    lengths = np.zeros(len(rows), dtype=np.int64)
    parts: list[tuple[I64, I64, npt.NDArray[np.uint32]]] = []
    for chunk, positions in population.by_chunk(rows):
        hashes = population.chunks[chunk].words()
        inside = population.place[rows[positions], 1]
        counts = hashes.counts[inside]
        lengths[positions] = counts
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        parts.append(
            (positions, counts, hashes.words[np.repeat(hashes.offsets[inside], counts) + within])
        )
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    words = np.zeros(offsets[-1], dtype=np.uint32)
    for positions, counts, taken in parts:
        within = np.arange(len(taken)) - np.repeat(np.cumsum(counts) - counts, counts)
        words[np.repeat(offsets[positions], counts) + within] = taken
    return WordHashes(words, offsets)
