"""Batches ahead of the trainer: shards are decoded and packed in threads, in a fixed order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from datagen.drafter.dataset import StatesSource
from datagen.drafter.packing import Usable
from datagen.drafter.rows import Batch, pack, padded


@dataclass(slots=True)
class Loader:
    """Reads batches of sample numbers. `waited_s`: time the trainer stood still for data.

    `pad`: rows of every batch, and what its query rows are a multiple of.
    """

    sources: Sequence[StatesSource]
    data: Usable
    depths: int
    threads: int = 2
    ahead: int = 4
    pin: bool = False
    pad: tuple[int, int] | None = None
    waited_s: float = field(default=0.0, init=False)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """One packed batch."""
        samples = [
            self.sources[self.data.refs[n].source].read(self.data.refs[n], self.data.lengths[n])
            for n in numbers
        ]
        packed = pack(samples, self.depths)
        if self.pad is not None:
            packed = padded(packed, *self.pad)
        return packed.pinned() if self.pin else packed

    def stream(self, plan: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Batches in the order of `plan`, up to `ahead` of them prepared in advance."""
        waiting: deque[Future[Batch]] = deque()
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="states")
        numbers = iter(plan)
        try:
            while True:
                while len(waiting) < self.ahead and (wanted := next(numbers, None)) is not None:
                    waiting.append(pool.submit(self.batch, wanted))
                if not waiting:
                    return
                started = time.perf_counter()
                batch = waiting.popleft().result()
                self.waited_s += time.perf_counter() - started
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def idle_copy(batch: Batch) -> Batch:
    """The batch with nothing to train: what a rank computes when it has no batch of its own."""
    from dataclasses import replace

    return replace(batch, mask_AK=torch.zeros_like(batch.mask_AK))
