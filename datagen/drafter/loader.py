"""Batches ahead of the trainer: shards are decoded and packed beside it, in a fixed order.

In threads, which is enough where a step takes longer than Python needs to pack one batch; or in processes,
for small drafters, whose steps of ten milliseconds leave the interpreter no time for anything else.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace

import torch

from datagen.drafter.dataset import StatesSource
from datagen.drafter.decoders import live_with_trainer, share, unstoppable
from datagen.drafter.packing import Usable
from datagen.drafter.rows import Batch, pack, padded
from datagen.errors import TrainingFailed

Submit = Callable[[Sequence[int]], "Future[Batch]"]
PINNING = 3  # threads that copy what processes made into page-locked memory


@dataclass(slots=True)
class Loader:
    """Reads batches of sample numbers. `waited_s`: time the trainer stood still for data.

    `pad`: rows of every batch, and what its query rows are a multiple of. `processes`: `threads` counts
    processes.
    """

    sources: Sequence[StatesSource]
    data: Usable
    depths: int
    threads: int = 2
    ahead: int = 4
    pin: bool = False
    pad: tuple[int, int] | None = None
    processes: bool = False
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
        numbers = iter(plan)
        with contextlib.ExitStack() as stack:
            submit = self._in_processes(stack) if self.processes else self._in_threads(stack)
            while True:
                while len(waiting) < self.ahead and (wanted := next(numbers, None)) is not None:
                    waiting.append(submit(wanted))
                if not waiting:
                    return
                started = time.perf_counter()
                batch = waiting.popleft().result()
                self.waited_s += time.perf_counter() - started
                yield batch

    def _in_threads(self, stack: contextlib.ExitStack) -> Submit:
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="states")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        return lambda numbers: pool.submit(self.batch, numbers)

    def _in_processes(self, stack: contextlib.ExitStack) -> Submit:
        hands = ThreadPoolExecutor(PINNING, thread_name_prefix="pin")
        stack.callback(hands.shutdown, wait=True, cancel_futures=True)
        plain = replace(self, pin=False, processes=False)
        context = multiprocessing.get_context("spawn")  # forked, it would hold the trainer's CUDA
        with _started():
            pool = ProcessPoolExecutor(self.threads, context, _open, (plain,))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def submit(numbers: Sequence[int]) -> Future[Batch]:
            with _started(), unstoppable():  # it starts processes while there are too few
                coming = pool.submit(_batch, numbers)
            return hands.submit(_received, coming, self.pin)

        return submit


_own: Loader | None = None
"""In a process that decodes: its loader."""


def _open(loader: Loader) -> None:
    global _own
    live_with_trainer()
    torch.set_num_threads(1)
    _own = loader


def _batch(numbers: Sequence[int]) -> Batch:
    assert _own is not None
    batch = _own.batch(numbers)
    share(batch)
    return batch


def _received(future: Future[Batch], pin: bool) -> Batch:
    try:
        batch = future.result()
    except BrokenProcessPool as e:
        raise _ended() from e
    return batch.pinned() if pin else batch


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """Around what starts processes: the pool's own faults as TrainingFailed."""
    try:
        yield
    except BrokenProcessPool as e:
        raise _ended() from e
    except OSError as e:
        raise TrainingFailed(
            f"the processes that decode shards cannot be started: {e}",
            fix="see whether memory, /dev/shm, processes or open files (ulimit) ran out; "
            "--no-graphs decodes in threads",
        ) from e


def _ended() -> TrainingFailed:
    return TrainingFailed(
        "a process that decodes shards ended by itself",
        fix="see whether memory, /dev/shm or open files (ulimit -n) ran out; "
        "--no-graphs decodes in threads",
    )


def idle_copy(batch: Batch) -> Batch:
    """The batch with nothing to train: what a rank computes when it has no batch of its own."""
    return replace(batch, mask_AK=torch.zeros_like(batch.mask_AK))
