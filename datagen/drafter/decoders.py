"""Processes that decode for a trainer: they end with it, however it ends, and at no one else's word.

Ctrl-C at a terminal and the SIGTERM of a scheduler reach every process of a job. The trainer then ends
its step and writes a checkpoint, and needs its batches for that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread

import torch.multiprocessing  # noqa: F401  tensors then come from processes in shared memory
from torch import Tensor

from datagen.drafter.rows import Batch
from datagen.errors import TrainingFailed

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def unstoppable() -> Iterator[None]:
    """Within: processes that this thread starts are born deaf to both signals, which this one gets."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def live_with_trainer() -> None:
    """In a process that was started: from here on it ends when its parent ends or ends it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    parent = multiprocessing.parent_process()
    assert parent is not None
    for until in (_gone, _told):
        Thread(target=_end, args=(until, parent), daemon=True).start()


def _end(until: Callable[[BaseProcess], None], parent: BaseProcess) -> None:
    until(parent)
    os._exit(1)  # the main thread may wait for its next batch for ever


def _gone(parent: BaseProcess) -> None:
    wait([parent.sentinel])


def _told(parent: BaseProcess) -> None:
    """A pool that lost one process ends the others by SIGTERM, and waits for them."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent.pid:
        pass


def share(batch: Batch) -> None:
    """Move its tensors to shared memory. Raises TrainingFailed when there is no room."""
    tensors = [v for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)]
    try:
        for tensor in tensors:
            if tensor.numel():
                tensor.share_memory_()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as e:
        size = sum(t.numel() * t.element_size() for t in tensors) / 1e6
        raise TrainingFailed(
            f"a batch of {size:,.0f} MB cannot be handed over in shared memory: {e}",
            where="/dev/shm",
            fix="make it larger (docker run --shm-size), lower --threads, or give --no-graphs, "
            "which decodes in threads",
        ) from e
