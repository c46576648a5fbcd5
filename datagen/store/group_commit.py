"""One writer thread for many open partitions: rows that wait together become durable together.

While one batch is being synced the next collects, so the cost of fsync is shared by whatever
arrived meanwhile, and a single row alone waits for a single sync. Batches begin at least `GATHER_S`
apart: on a disk that syncs at once, each row would otherwise be a batch, of 0.3 ms.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datagen.store.partition import PartitionStore

MAX_BATCH, MAX_BATCH_BYTES = 256, 64 << 20  # no row waits for a gigabyte of others to be written
GATHER_S = 0.05


@dataclass(slots=True)
class Order:
    """An action on a store. Once told: `result` of the action, or the `error` that became of it."""

    store: PartitionStore
    action: Callable[[PartitionStore], Any]
    tell: Callable[[list[Order]], None]
    """Called on the writer thread, once a batch with all of the batch's orders that have the same one."""
    n_bytes: int = 0
    """About what the action writes."""
    ticket: Any = None
    """The caller's own."""
    result: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    """Nobody waits for it: it is not carried out, unless it was already."""


class GroupCommitter:
    """Orders are told once their rows are on disk."""

    def __init__(self, *, max_queued: int = 1024) -> None:
        self._orders: queue.Queue[Order | None] = queue.Queue(max_queued)
        self._poison: BaseException | None = None
        self._closed = False
        self._next_batch_at = 0.0
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
        self._thread.start()

    def put(self, order: Order) -> None:
        """Queue `order`; blocks while the queue is full. An action's error is its order's.

        Once anything has failed (a full disk) a file may end in half a row, so nothing more is
        promised: that first error is the answer to every later order.
        """
        with self._gate:  # nothing may follow the end: it would never be carried out
            if self._closed:
                raise RuntimeError("the committer is closed")
            self._orders.put(order)

    def close(self) -> None:
        """Finish what is queued and end the thread. May be repeated."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        ending = full = False
        while not ending:
            orders = [self._orders.get()]
            if not self._closed and not full:
                time.sleep(max(0.0, self._next_batch_at - time.monotonic()))
            self._next_batch_at = time.monotonic() + GATHER_S
            n_bytes = orders[0].n_bytes if orders[0] else 0
            while len(orders) < MAX_BATCH and n_bytes < MAX_BATCH_BYTES:
                try:
                    orders.append(self._orders.get_nowait())
                except queue.Empty:
                    break
                n_bytes += orders[-1].n_bytes if orders[-1] else 0
            full = n_bytes >= MAX_BATCH_BYTES
            ending = None in orders
            self._carry_out([o for o in orders if o is not None])
            orders.clear()  # their rows would stay in memory until the next batch

    def _carry_out(self, orders: list[Order]) -> None:
        applied: dict[int, tuple[PartitionStore, list[Order]]] = {}
        told: dict[Callable[[list[Order]], None], list[Order]] = {}
        for order in orders:
            if order.cancelled:
                continue
            told.setdefault(order.tell, []).append(order)
            try:
                if self._poison is not None:
                    raise self._poison
                order.result = order.action(order.store)
            except BaseException as e:  # noqa: BLE001 - the caller's, wherever it came from
                self._fail(order, e)
            else:
                applied.setdefault(id(order.store), (order.store, []))[1].append(order)
        for store, done in applied.values():
            try:
                store.commit()
            except BaseException as e:  # noqa: BLE001
                for order in done:
                    self._fail(order, e)
        for tell, of_one in told.items():
            tell(of_one)

    def _fail(self, order: Order, error: BaseException) -> None:
        self._poison = self._poison or error
        order.error = error
