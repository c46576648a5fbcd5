"""Texts as sequences of words, and words as numbers: the ground of deduplication and decontamination.

A word is a run of letters, digits and the marks that belong to them, after NFKC and casefold;
each Han, Hiragana and Katakana character is a word of its own, because those scripts write no
spaces. Case, punctuation, spacing and width of characters make no difference.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datagen.prompts.identity import mix64

UNSPACED = "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_ASCII_WORD = re.compile(r"[0-9a-z_]+")


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    marks = "".join(
        chr(c) for c in range(0x300, 0x1E000) if unicodedata.category(chr(c)) in ("Mn", "Mc")
    )
    return re.compile(f"[{UNSPACED}]|(?:[^\\W{UNSPACED}]|[{re.escape(marks)}])+")


def words_of(text: str) -> list[str]:
    """The words of a text, in order; of a text without any, its symbols between spaces."""
    if text.isascii():
        words = _ASCII_WORD.findall(text.lower())
    else:
        words = _word_pattern().findall(unicodedata.normalize("NFKC", text).casefold())
    return words or text.split()


@functools.lru_cache(maxsize=4)
def _powers(length: int, base: np.uint64) -> npt.NDArray[np.uint64]:
    powers = np.full(length, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class WordHashes:
    """The words of n texts as numbers. `words` uint32 [total]; `offsets` int64 [n + 1]."""

    words: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Words of each text, [n]."""
        return np.diff(self.offsets)


def hash_words(texts: list[list[str]]) -> WordHashes:
    """Each word as 32 bits, the same on every machine: a polynomial over its UTF-8 bytes, mixed.

    All texts are hashed in one pass over one buffer: the prefix sums of byte * base^position are
    differenced at word boundaries and divided by base^start, which an odd base allows mod 2^64.
    """
    counts = np.fromiter((len(t) for t in texts), dtype=np.int64, count=len(texts))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    pieces: list[npt.NDArray[np.uint32]] = []
    for block in _blocks(texts):
        joined = " ".join(block).encode()
        data = np.frombuffer(joined, dtype=np.uint8)
        spaces = np.flatnonzero(data == 0x20)
        starts = np.concatenate(([0], spaces + 1))
        size = 1 << max(20, int(len(data) - 1).bit_length())
        terms = (data.astype(np.uint64) + np.uint64(1)) * _powers(size, _BASE)[: len(data)]
        terms[spaces] = 0
        sums = np.add.reduceat(terms, starts) * _powers(size, _INVERSE)[starts]
        pieces.append((mix64(sums) >> np.uint64(32)).astype(np.uint32))
    words = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint32)
    return WordHashes(words, offsets)


def concatenated(parts: list[WordHashes]) -> WordHashes:
    """The texts of all parts, in order."""
    counts = [np.zeros(0, dtype=np.int64), *(part.counts for part in parts)]
    words = [np.zeros(0, dtype=np.uint32), *(part.words for part in parts)]
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int64)
    return WordHashes(np.concatenate(words), offsets)


def _blocks(texts: list[list[str]], words: int = 1 << 17) -> Iterator[list[str]]:
    """The words of all texts, in blocks of about `words`."""
    block: list[str] = []
    for text in texts:
        for start in range(0, len(text), words):
            block.extend(text[start : start + words])
            if len(block) >= words:
                yield block
                block = []
    if block:
        yield block


def ngram_hashes(
    hashes: WordHashes, n: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Every run of n words as 64 bits, and the text it belongs to: ([m], [m]). Texts keep order."""
    words, counts = hashes.words, hashes.counts
    per_text = np.maximum(counts - (n - 1), 0)
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), per_text)
    if len(owner) == 0:
        return np.zeros(0, dtype=np.uint64), owner
    within = np.arange(len(owner)) - np.repeat(np.cumsum(per_text) - per_text, per_text)
    start = hashes.offsets[owner] + within
    value = np.full(len(owner), 0x51_7C_C1_B7_27_22_0A_95, dtype=np.uint64)
    for k in range(n):
        value = value * _BASE + words[start + k].astype(np.uint64)
        value ^= value >> np.uint64(29)
    return mix64(value), owner
