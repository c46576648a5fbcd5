"""The order of training: which samples, packed how, at which step. A pure function of the seed.

An epoch's samples are shuffled, cut into windows, sorted by length within a window (samples of one
batch cost alike, and long attention does not wait for short), packed up to a number of tokens, and
the packed batches are shuffled again within the window. So step n is known without the steps before
it: resuming is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datagen.drafter.dataset import SampleRef
from datagen.drafter.rows import trained_counts
from datagen.errors import ConfigError

WINDOW_BATCHES = 32


@dataclass(frozen=True, slots=True)
class Usable:
    """Samples that train something, clipped to `max_tokens`; what was left out is counted.

    `clipped`: samples cut at their end. `no_row`: samples without a trained row (a response of one
    token, or cut away whole).
    """

    refs: tuple[SampleRef, ...]
    lengths: tuple[int, ...]
    clipped: int
    no_row: int


def usable(refs: Sequence[SampleRef], max_tokens: int) -> Usable:
    """Which samples train, and how many of their tokens are read."""
    kept, lengths, clipped, no_row = [], [], 0, 0
    for ref in refs:
        n = min(ref.n_tokens, max_tokens)
        if ref.n_context < 1 or n - ref.n_context < 2:
            no_row += 1
            continue
        clipped += n < ref.n_tokens
        kept.append(ref)
        lengths.append(n)
    return Usable(tuple(kept), tuple(lengths), clipped, no_row)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. `batches[rank][i]`: sample numbers of a micro-batch; [] is a filler.

    `rows[k]`: trained rows of the whole step at depth k; `tokens`: all its tokens.
    """

    number: int
    epoch: int
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    rows: tuple[int, ...]
    tokens: int


class Order:
    """Steps of a training run. `weights`: how often each source's samples come in an epoch."""

    def __init__(
        self, data: Usable, *, seed: int, batch_tokens: int, accumulate: int, ranks: int,
        depths: int, weights: Sequence[float],
    ) -> None:  # fmt: skip
        if not data.refs:
            raise ConfigError(
                f"no sample has a trained row ({data.no_row} have none)",
                fix="collect longer responses, or raise --batch-tokens",
            )
        self._data, self._seed, self._batch_tokens = data, seed, batch_tokens
        self._accumulate, self._ranks, self._weights = accumulate, ranks, tuple(weights)
        self._lengths = np.array(data.lengths)
        self._counts = np.array(
            [
                trained_counts(n, r.n_context, depths)
                for r, n in zip(data.refs, data.lengths, strict=True)
            ]
        )
        self._epochs: dict[int, list[list[int]]] = {}
        self._first_step = [0]

    def steps_in(self, epoch: int) -> int:
        """Optimizer steps of an epoch; the last one may be smaller."""
        return -(-len(self._batches(epoch)) // (self._accumulate * self._ranks))

    def total_steps(self, epochs: int) -> int:
        """Steps of the first `epochs` epochs."""
        self._reach(epochs)
        return self._first_step[epochs]

    def step(self, number: int) -> Step:
        """Step `number`, from 0. Every epoch is another order."""
        epoch = 0
        while True:
            self._reach(epoch + 1)
            if number < self._first_step[epoch + 1]:
                break
            epoch += 1
        batches = self._batches(epoch)
        size = self._accumulate * self._ranks
        start = (number - self._first_step[epoch]) * size
        chosen = batches[start : start + size]
        rounds = -(-len(chosen) // self._ranks)
        per_rank = tuple(
            tuple(
                tuple(chosen[i * self._ranks + rank])
                if i * self._ranks + rank < len(chosen)
                else ()
                for i in range(rounds)
            )
            for rank in range(self._ranks)
        )
        numbers = [n for batch in chosen for n in batch]
        return Step(
            number=number, epoch=epoch, batches=per_rank,
            rows=tuple(int(c) for c in self._counts[numbers].sum(axis=0)),
            tokens=int(self._lengths[numbers].sum()),
        )  # fmt: skip

    def _reach(self, epochs: int) -> None:
        while len(self._first_step) <= epochs:
            epoch = len(self._first_step) - 1
            self._first_step.append(self._first_step[-1] + self.steps_in(epoch))

    def _batches(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            self._epochs = {e: b for e, b in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = self._packed(epoch)
        return self._epochs[epoch]

    def _packed(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(self._chosen(rng))
        mean = float(self._lengths[order].mean())
        window = max(1, int(WINDOW_BATCHES * self._batch_tokens / mean))
        packed: list[list[int]] = []
        for start in range(0, len(order), window):
            part = order[start : start + window]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            batches = filled(part.tolist(), self._data.lengths, self._batch_tokens)
            packed += [batches[i] for i in rng.permutation(len(batches))]
        return packed

    def _chosen(self, rng: np.random.Generator) -> np.ndarray:
        """Sample numbers of an epoch: each source's, as often as its weight says."""
        source = np.array([r.source for r in self._data.refs])
        parts = []
        for number, weight in enumerate(self._weights):
            own = np.flatnonzero(source == number)
            whole, rest = divmod(round(weight * len(own)), max(1, len(own)))
            parts += [own] * whole + [rng.permutation(own)[:rest]]
        chosen = np.concatenate(parts)
        if not len(chosen):
            raise ConfigError("the weights leave no sample to train on", fix="raise --weights")
        return chosen


def filled(numbers: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Numbers in their order, in groups of up to `most` tokens; a longer one is alone."""
    groups: list[list[int]] = []
    used = most + 1
    for number in numbers:
        if used + lengths[number] > most:
            groups.append([])
            used = 0
        groups[-1].append(number)
        used += lengths[number]
    return groups
