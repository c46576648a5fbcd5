"""Digests of a file while it is written: SHA-256 of the whole, XXH3 of each row.

SHA-256 takes as long as writing does, and a writer that waits for it writes half as much. So large
pieces, and what follows them, are summed on the compute threads while the writer goes on.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from concurrent.futures import Future

import xxhash

from datagen.store.threads import compute_threads

LARGE_BYTES = 1 << 20  # for less, a change of threads costs as much
MOST_WAITING_BYTES = 64 << 20  # pieces stay in memory until they are summed


class Backlog:
    """Bytes that wait to be summed, of all files together."""

    def __init__(self) -> None:
        self._gate, self._bytes = threading.Lock(), 0

    def add(self, n_bytes: int) -> None:
        """So many more wait, or fewer."""
        with self._gate:
            self._bytes += n_bytes

    @property
    def full(self) -> bool:
        """Whether a writer should wait for what it left behind."""
        return self._bytes > MOST_WAITING_BYTES


BACKLOG = Backlog()


class Digests:
    """Of what `add` is given, in its order. One thread calls it."""

    def __init__(self) -> None:
        self._sha256, self._row = hashlib.sha256(), xxhash.xxh3_64()
        self._rows: list[str] = []
        self._gate = threading.Lock()
        self._waiting: deque[memoryview | int] = deque()
        """Pieces; between them, how many rows end there."""
        self._task: Future[None] | None = None
        """Sums what waits; None: nothing does."""

    def add(self, piece: memoryview) -> None:
        """More of the file. `piece` is kept for a while: what it shows must not change."""
        if BACKLOG.full:
            self._settle()
        if self._task is None and len(piece) < LARGE_BYTES:
            self._sum(piece)
        else:
            self._queue(piece)

    def end_rows(self, count: int) -> None:
        """What was added since the last call is `count` rows, which share a digest."""
        if self._task is None:
            self._end(count)
        else:
            self._queue(count)

    def sha256(self) -> str:
        """Of everything, in hex."""
        self._settle()
        return self._sha256.hexdigest()

    def rows(self) -> tuple[str, ...]:
        """XXH3 of every row, in hex."""
        self._settle()
        return tuple(self._rows)

    def _queue(self, item: memoryview | int) -> None:
        with self._gate:
            if self._task is None:
                self._task = compute_threads().submit(self._work)
            elif self._task.done():  # and not taken back: it failed
                self._task.result()
            self._waiting.append(item)
            BACKLOG.add(0 if isinstance(item, int) else len(item))

    def _settle(self) -> None:
        """Wait until nothing waits."""
        task = self._task
        if task is not None:
            task.result()

    def _work(self) -> None:
        while True:
            with self._gate:
                if not self._waiting:
                    self._task = None
                    return
                item = self._waiting.popleft()
            if isinstance(item, int):
                self._end(item)
            else:
                try:
                    self._sum(item)
                finally:
                    BACKLOG.add(-len(item))
            del item

    def _sum(self, piece: memoryview) -> None:
        self._row.update(piece)
        self._sha256.update(piece)

    def _end(self, count: int) -> None:
        self._rows += [self._row.hexdigest()] * count
        self._row.reset()
