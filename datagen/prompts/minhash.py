"""Near duplicates: which texts have nearly the same set of word n-grams (shingles).

MinHash signatures in bands propose pairs; the signatures' agreement sorts out the hopeless ones; the
exact Jaccard similarity of the shingle sets decides. So precision is that of exact comparison, and
recall that of the bands: with 16 bands of 4 rows, a pair at the default threshold of 0.82 is proposed
with probability 1 - (1 - 0.82^4)^16 = 0.9999.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datagen.prompts.mix import Near
from datagen.prompts.words import WordHashes, ngram_hashes

BLOCK_SHINGLES = 1 << 16
MOST_NEIGHBOURS = 32
MARGIN_SIGMAS = 3.0
"""How far below the threshold an estimate may lie before a pair is given up."""
PAIRS_AT_A_TIME = 1 << 16
SHINGLES_AT_A_TIME = 1 << 19


@dataclass(frozen=True, slots=True)
class Sketch:
    """n texts in small: `bands` uint32 [n, bands]; `low` uint8 [n, permutations], the low bits of the
    signature; `sketched` bool [n], False for texts too short to be compared."""

    bands: npt.NDArray[np.uint32]
    low: npt.NDArray[np.uint8]
    sketched: npt.NDArray[np.bool_]


def sketch(hashes: WordHashes, near: Near, salt: npt.NDArray[np.uint64]) -> Sketch:
    """The sketch of every text. Texts of different `salt` [n] are not proposed as a pair."""
    n = len(hashes.counts)
    signature = np.full((n, near.permutations), 0xFFFFFFFF, dtype=np.uint32)
    sketched = hashes.counts >= near.min_words
    shingles, owner = _shingles(hashes, near)
    multipliers, masks = _permutations(near.permutations)
    for start, stop in _blocks(owner):
        block = shingles[start:stop]
        cuts = np.flatnonzero(np.concatenate(([True], np.diff(owner[start:stop]) > 0)))
        texts = owner[start:stop][cuts]
        for k in range(near.permutations):
            permuted = (block ^ masks[k]) * multipliers[k]
            permuted ^= permuted >> np.uint32(15)
            least = np.minimum.reduceat(permuted * multipliers[k - 1], cuts)
            signature[texts, k] = np.minimum(signature[texts, k], least)
    rows = near.permutations // near.bands
    folded = np.repeat(salt[:, None], near.bands, axis=1)
    for r in range(rows):
        folded = (folded ^ signature[:, r::rows]) * np.uint64(0x9E3779B97F4A7C15)
        folded ^= folded >> np.uint64(32)
    return Sketch(folded.astype(np.uint32), signature.astype(np.uint8), sketched)


def near_duplicates(
    sketches: Sketch,
    near: Near,
    words_of: Callable[[npt.NDArray[np.int64]], WordHashes],
    comparable: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """True for texts that are near duplicates of an earlier text that stays, [n].

    `words_of` gives the words of some texts, in the order asked. Texts outside `comparable` are
    neither dropped nor compared with.
    """
    rows = np.flatnonzero(comparable & sketches.sketched)
    dropped = np.zeros(len(comparable), dtype=np.bool_)
    while True:
        pairs, crowded = _proposed(sketches.bands[rows], sketches.low[rows], near.threshold)
        alike = _alike(pairs, rows, words_of, near)
        for earlier, later in rows[alike].tolist():
            if not dropped[earlier]:
                dropped[later] = True
        if len(alike) == 0 or not crowded.any():
            return dropped
        # crowds were compared in part: again, until none that stays resembles another
        rows = rows[crowded & ~dropped[rows]]


def _alike(
    pairs: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    words_of: Callable[[npt.NDArray[np.int64]], WordHashes],
    near: Near,
) -> npt.NDArray[np.int64]:
    """The pairs whose exact similarity reaches the threshold, by their later text, [m, 2]."""
    if len(pairs) == 0:
        return pairs
    involved = np.unique(pairs)
    similarity = _jaccard(np.searchsorted(involved, pairs), words_of(rows[involved]), near)
    alike = pairs[similarity >= near.threshold]
    return alike[np.lexsort((alike[:, 0], alike[:, 1]))]


def _permutations(count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    generator = np.random.Generator(np.random.PCG64(0x5EED))
    odd = generator.integers(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return odd, generator.integers(0, 1 << 32, count, dtype=np.uint32)


def _shingles(
    hashes: WordHashes, near: Near
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Every shingle of every text as 32 bits, and its text: ([m], [m])."""
    grams, owner = ngram_hashes(hashes, near.shingle_words)
    return (grams >> np.uint64(32)).astype(np.uint32), owner


def _blocks(owner: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    starts = range(0, len(owner), BLOCK_SHINGLES)
    return [(s, min(s + BLOCK_SHINGLES, len(owner))) for s in starts]


def _proposed(
    bands: npt.NDArray[np.uint32], low: npt.NDArray[np.uint8], threshold: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Pairs (earlier, later) that share a band and whose signatures agree well enough, [m, 2], and
    which texts, [n], are in a crowd: a run too long for every pair to be looked at.

    Within a run of equal bands, texts stand in the order of the next band, so that the most alike
    are neighbours; each is paired with the 32 before it and with the earliest text of its run.
    """
    n_texts, n_bands = bands.shape
    if n_texts == 0:
        return np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.bool_)
    crowded = np.zeros(n_texts, dtype=np.bool_)
    found: list[npt.NDArray[np.int64]] = []
    for b in range(n_bands):
        key = bands[:, b].astype(np.uint64) << np.uint64(32)
        order = np.argsort(key | bands[:, (b + 1) % n_bands], kind="stable")
        run = bands[order, b]
        starts = np.flatnonzero(np.concatenate(([True], run[1:] != run[:-1])))
        lengths = np.diff(np.append(starts, n_texts))
        crowded[order[np.repeat(lengths > MOST_NEIGHBOURS + 1, lengths)]] = True
        place = np.arange(n_texts) - np.repeat(starts, lengths)
        earliest = np.repeat(np.minimum.reduceat(order, starts), lengths)
        for distance in range(1, MOST_NEIGHBOURS + 2):
            later = np.flatnonzero(place >= distance)
            if len(later) == 0:
                break
            near_by = distance <= MOST_NEIGHBOURS
            earlier = order[later - distance] if near_by else earliest[later]
            found.append(_agreeing(earlier, order[later], low, threshold))
    codes = [np.minimum(p[:, 0], p[:, 1]) * n_texts + np.maximum(p[:, 0], p[:, 1]) for p in found]
    unique = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *codes]))
    return np.stack([unique // n_texts, unique % n_texts], axis=1), crowded


def _agreeing(
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    low: npt.NDArray[np.uint8],
    threshold: float,
) -> npt.NDArray[np.int64]:
    """The pairs whose estimated similarity is not hopelessly below the threshold, [m, 2]."""
    kept: list[npt.NDArray[np.int64]] = []
    sigma = (threshold * (1 - threshold) / low.shape[1]) ** 0.5
    least = (threshold - MARGIN_SIGMAS * sigma) * low.shape[1]
    for start in range(0, len(left), PAIRS_AT_A_TIME):
        a, b = left[start : start + PAIRS_AT_A_TIME], right[start : start + PAIRS_AT_A_TIME]
        enough = ((low[a] == low[b]).sum(axis=1) >= least) & (a != b)
        kept.append(np.stack([a[enough], b[enough]], axis=1))
    return np.concatenate(kept)


def _jaccard(
    pairs: npt.NDArray[np.int64], hashes: WordHashes, near: Near
) -> npt.NDArray[np.float64]:
    """Exact Jaccard similarity of the shingle sets of each pair, [m]. `pairs` index `hashes`."""
    shingles, owner = _shingles(hashes, near)
    keys = np.unique(owner.astype(np.uint64) << np.uint64(32) | shingles)
    bounds = np.searchsorted(
        keys, np.arange(len(hashes.counts) + 1, dtype=np.uint64) << np.uint64(32)
    )
    sizes = np.diff(bounds)
    order = np.argsort(pairs[:, 1], kind="stable")
    shared = np.zeros(len(pairs), dtype=np.int64)
    work = np.cumsum(sizes[pairs[order, 0]])
    cuts = np.searchsorted(work, np.arange(0, work[-1] + 1, SHINGLES_AT_A_TIME))
    for part in np.split(order, np.unique(cuts)):
        left, right = pairs[part, 0], pairs[part, 1]
        counts = sizes[left]
        pair = np.repeat(np.arange(len(part)), counts)
        inside = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
        wanted = keys[bounds[left][pair] + inside] & np.uint64(0xFFFFFFFF)
        wanted |= right[pair].astype(np.uint64) << np.uint64(32)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        shared[part] = np.bincount(pair[keys[at] == wanted], minlength=len(part))
    union = sizes[pairs[:, 0]] + sizes[pairs[:, 1]] - shared
    return shared / np.maximum(union, 1)
