"""The draft vocabulary: which target tokens the drafter can propose.

d2t int64 [U]: target id - draft id, of each draft token; t2d bool [V]: the target ids covered.
Draft ids follow target ids in order. A warm start keeps its checkpoint's map: rebuilt, it would
re-point every row of lm_head, which ruins acceptance and shows in no training metric.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datagen.drafter.rows import NO_LABEL
from datagen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """`target_ids_U`: the target id of each draft id, increasing; of a vocabulary of `vocab_size`."""

    target_ids_U: NDArray[np.int64]
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids_U
        if len(ids) == 0 or ids[0] < 0 or ids[-1] >= self.vocab_size or (np.diff(ids) <= 0).any():
            raise ConfigError(
                "the draft vocabulary is no increasing list of target ids",
                fix="the checkpoint's d2t is damaged or of another target",
            )

    @property
    def d2t(self) -> Tensor:
        """Offsets int64 [U]."""
        return torch.from_numpy(self.target_ids_U - np.arange(len(self.target_ids_U)))

    @property
    def t2d(self) -> Tensor:
        """bool [V]."""
        covered = torch.zeros(self.vocab_size, dtype=torch.bool)
        covered[torch.from_numpy(self.target_ids_U)] = True
        return covered

    @property
    def draft_ids(self) -> Tensor:
        """Draft id of each target id, NO_LABEL outside; int64 [V]."""
        found = torch.full((self.vocab_size,), NO_LABEL)
        found[torch.from_numpy(self.target_ids_U)] = torch.arange(len(self.target_ids_U))
        return found

    @property
    def digest(self) -> str:
        """sha256 of the ids and the vocabulary's size: the lock of a map."""
        sized = hashlib.sha256(f"{self.vocab_size}:".encode())
        sized.update(np.ascontiguousarray(self.target_ids_U, dtype="<i8").tobytes())
        return sized.hexdigest()


def from_maps(d2t: Tensor, t2d: Tensor) -> DraftVocab:
    """From a checkpoint's two tensors; raises ConfigError when they do not say the same."""
    ids = d2t.to(torch.int64).numpy() + np.arange(len(d2t))
    vocab = DraftVocab(ids, len(t2d))
    if not torch.equal(vocab.t2d, t2d.to(torch.bool)):
        raise ConfigError("d2t and t2d name different tokens", fix="the checkpoint is damaged")
    return vocab


def by_frequency(
    frequencies: Mapping[int, int], size: int, vocab_size: int, always: Iterable[int] = ()
) -> DraftVocab:
    """The `size` most frequent tokens; `always` (stop tokens) first, ties to the lowest id. O(V)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    if frequencies:
        ids = np.fromiter(frequencies.keys(), dtype=np.int64, count=len(frequencies))
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ConfigError(
                f"the data has token {ids.max()}, the target {vocab_size} tokens",
                fix="the checkpoint is another target's",
            )
        counts[ids] = np.fromiter(frequencies.values(), dtype=np.int64, count=len(frequencies))
    counts[list(always)] = np.iinfo(np.int64).max
    if not 0 < size <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {size} of {vocab_size} tokens")
    if size == vocab_size:
        return DraftVocab(np.arange(vocab_size), vocab_size)
    floor = np.partition(counts, vocab_size - size)[vocab_size - size]
    above = np.flatnonzero(counts > floor)
    at = np.flatnonzero(counts == floor)[: size - len(above)]
    return DraftVocab(np.sort(np.concatenate([above, at])), vocab_size)


def whole(vocab_size: int) -> DraftVocab:
    """Every target token."""
    return DraftVocab(np.arange(vocab_size), vocab_size)


@dataclass(slots=True)
class Coverage:
    """Supervised tokens by group (a source, a language), and those inside the draft vocabulary."""

    vocab: DraftVocab
    tokens: dict[str, int]
    inside: dict[str, int]

    @classmethod
    def of(cls, vocab: DraftVocab) -> Coverage:
        """Nothing counted yet."""
        return cls(vocab, {}, {})

    def add(self, group: str, ids: NDArray[np.integer]) -> None:
        """Count the supervised tokens of a sample."""
        found = np.searchsorted(self.vocab.target_ids_U, ids)
        found = np.minimum(found, len(self.vocab.target_ids_U) - 1)
        inside = int((self.vocab.target_ids_U[found] == ids).sum())
        self.tokens[group] = self.tokens.get(group, 0) + len(ids)
        self.inside[group] = self.inside.get(group, 0) + inside

    def shares(self) -> dict[str, float]:
        """Group -> share of its supervised tokens that the drafter can propose."""
        return {g: self.inside[g] / n for g, n in sorted(self.tokens.items()) if n}
