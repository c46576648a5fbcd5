"""Training prompts that contain held-out ones.

A prompt is contaminated when
    - one of its user turns (of 5 words or more), or all of them together, is a held-out turn or prompt;
    - or it shares a word n-gram with a held-out prompt, and
      either it is shorter than `long_text_words`,
      or the n-grams it shares are at least `long_text_share` of its own,
      or they are at least half of those of one held-out turn.
The length-aware part keeps long transcripts whose boilerplate happens to recur elsewhere, and still
finds a held-out prompt planted in the middle of one. Case, punctuation and spacing never matter.
Held-out prompts shorter than one n-gram are found as whole turns only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datagen.prompts.cache import load_arrays, save_arrays
from datagen.prompts.candidates import Chunk
from datagen.prompts.mix import Decontaminate
from datagen.prompts.words import WordHashes, ngram_hashes

NO_SET = -1
ITEM_SHARE = 0.5
MIN_TURN_WORDS = 5
FILTER_BITS = 24


@dataclass(frozen=True, slots=True)
class HeldoutIndex:
    """All held-out prompts, for look-up.

    turns uint64 [t] sorted, turn_set int16 [t]: whole turns and prompts, and their set.
    grams uint64 [g] sorted, with repeats: n-grams; gram_item int32 [g]: the user turn of each.
    item_set int16 [p], item_grams int32 [p]: each user turn's set, and how many n-grams it has.
    """

    turns: npt.NDArray[np.uint64]
    turn_set: npt.NDArray[np.int16]
    grams: npt.NDArray[np.uint64]
    gram_item: npt.NDArray[np.int32]
    item_set: npt.NDArray[np.int16]
    item_grams: npt.NDArray[np.int32]

    def save(self, path: Path) -> None:
        """Write to the cache."""
        save_arrays(path, **{name: getattr(self, name) for name in self.__slots__})

    def digest(self) -> str:
        """sha256 of the content."""
        sha = hashlib.sha256()
        for name in self.__slots__:
            sha.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return sha.hexdigest()


@functools.lru_cache(maxsize=1)
def load_index(path: Path) -> HeldoutIndex:
    """The index of a path, kept for the next chunk. Raises FileNotFoundError."""
    arrays = load_arrays(path)
    if arrays is None:
        raise FileNotFoundError(path)
    return HeldoutIndex(**arrays)


@functools.lru_cache(maxsize=1)
def _filter(path: Path) -> npt.NDArray[np.bool_]:
    """Which low bits occur in the index's n-grams: rules most of a text's n-grams out quickly."""
    present = np.zeros(1 << FILTER_BITS, dtype=np.bool_)
    present[load_index(path).grams & np.uint64((1 << FILTER_BITS) - 1)] = True
    return present


def build_index(sets: Sequence[Sequence[Chunk]], rule: Decontaminate) -> HeldoutIndex:
    """The index over held-out sets, each given by its chunks. Only user turns count."""
    turns: list[npt.NDArray[Any]] = []
    turn_set: list[npt.NDArray[Any]] = []
    grams: list[npt.NDArray[Any]] = []
    gram_item: list[npt.NDArray[Any]] = []
    item_set: list[npt.NDArray[Any]] = []
    n_items = 0
    for number, chunks in enumerate(sets):
        for chunk in chunks:
            batch = chunk.columns("turn_words", "turns")
            user_turns = _user_turns(chunk.words(), batch.column("turn_words"))
            found, owner = ngram_hashes(user_turns, rule.ngram_words)
            order = np.lexsort((found, owner))
            found, owner = found[order], owner[order]
            new = np.ones(len(found), dtype=np.bool_)
            new[1:] = (np.diff(found) != 0) | (np.diff(owner) != 0)
            grams.append(found[new])
            gram_item.append(owner[new].astype(np.int32) + n_items)
            of_chunk = batch.column("turns").values.to_numpy()
            turns.append(of_chunk)
            turn_set.append(np.full(len(of_chunk), number, dtype=np.int16))
            item_set.append(np.full(len(user_turns.counts), number, dtype=np.int16))
            n_items += len(user_turns.counts)
    every_turn, every_gram = _joined(turns, np.uint64), _joined(grams, np.uint64)
    items = _joined(gram_item, np.int32)
    every_turn, first = np.unique(every_turn, return_index=True)
    order = np.argsort(every_gram, kind="stable")
    return HeldoutIndex(
        turns=every_turn,
        turn_set=_joined(turn_set, np.int16)[first],
        grams=every_gram[order],
        gram_item=items[order],
        item_set=_joined(item_set, np.int16),
        item_grams=np.bincount(items, minlength=n_items).astype(np.int32),
    )


def contaminated(chunk: Chunk, index_path: Path, rule: Decontaminate) -> npt.NDArray[np.int16]:
    """For each candidate the number of the set that it is contaminated by, or NO_SET, [n]."""
    index = load_index(index_path)
    hashes = chunk.words()
    result = _by_grams(hashes, index, _filter(index_path), rule)
    batch = chunk.columns("turn_words", "turns")
    turns, offsets = (
        batch.column("turns").values.to_numpy(),
        batch.column("turns").offsets.to_numpy(),
    )
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    is_whole = np.zeros(len(turns), dtype=np.bool_)
    is_whole[offsets[1:] - 1] = True
    counts = is_whole.copy()
    counts[~is_whole] = batch.column("turn_words").values.to_numpy() >= MIN_TURN_WORDS
    if len(index.turns):
        at = np.minimum(np.searchsorted(index.turns, turns), len(index.turns) - 1)
        hit = np.flatnonzero((index.turns[at] == turns) & counts)[::-1]  # the first one stays
        result[owner[hit]] = index.turn_set[at[hit]]
    return result


def _by_grams(
    hashes: WordHashes,
    index: HeldoutIndex,
    present: npt.NDArray[np.bool_],
    rule: Decontaminate,
) -> npt.NDArray[np.int16]:
    counts = hashes.counts
    result = np.full(len(counts), NO_SET, dtype=np.int16)
    if len(index.grams) == 0:
        return result
    grams, owner = ngram_hashes(hashes, rule.ngram_words)
    likely = np.flatnonzero(present[grams & np.uint64((1 << FILTER_BITS) - 1)])
    first = np.searchsorted(index.grams, grams[likely])
    first = np.minimum(first, len(index.grams) - 1)
    hit = index.grams[first] == grams[likely]
    text, first = owner[likely][hit], first[hit]
    shared = np.bincount(text, minlength=len(counts))
    n_grams = np.maximum(counts - rule.ngram_words + 1, 1)
    bounds = np.searchsorted(text, np.arange(len(counts) + 1))
    for i in np.flatnonzero(shared):
        item, covers = _most_covered(np.unique(first[bounds[i] : bounds[i + 1]]), index)
        if (
            counts[i] < rule.long_text_words
            or covers >= ITEM_SHARE
            or shared[i] / n_grams[i] >= rule.long_text_share
        ):
            result[i] = index.item_set[item]
    return result


def _most_covered(first: npt.NDArray[np.int64], index: HeldoutIndex) -> tuple[int, float]:
    """Of the held-out turns that have the n-grams at `first`, the one most of which is found."""
    last = np.searchsorted(index.grams, index.grams[first], side="right")
    lengths = last - first
    places = np.repeat(first, lengths) + np.arange(lengths.sum())
    places -= np.repeat(np.cumsum(lengths) - lengths, lengths)
    items, counts = np.unique(index.gram_item[places], return_counts=True)
    covers = counts / index.item_grams[items]
    best = int(np.argmax(covers))
    return int(items[best]), float(covers[best])


def _user_turns(hashes: WordHashes, turn_words: pa.ListArray) -> WordHashes:
    """Every user turn of a chunk as a text of its own: a chunk has their words in front, in order."""
    lengths = turn_words.values.to_numpy().astype(np.int64)
    of_row = turn_words.offsets.to_numpy()
    before = np.concatenate(([0], np.cumsum(lengths)))
    owner = np.repeat(np.arange(len(of_row) - 1), np.diff(of_row))
    starts = hashes.offsets[owner] + before[:-1] - before[of_row[owner]]
    within = np.arange(lengths.sum()) - np.repeat(before[:-1], lengths)
    return WordHashes(hashes.words[np.repeat(starts, lengths) + within], before)


def _joined(parts: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
