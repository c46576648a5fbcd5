"""One writer thread for every open partition: rows that wait together become durable together.

While one batch is being synced the next collects, so the cost of fsync is shared by whatever
arrived meanwhile, and a single row alone waits for a single sync.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from datagen.store.partition import PartitionStore

T = TypeVar("T")
MAX_BATCH = 256


@dataclass(slots=True)
class _Order:
    store: PartitionStore
    action: Callable[[PartitionStore], Any]
    future: Future[Any]
    result: Any = None


class GroupCommitter:
    """`submit` returns a future that resolves once the action's rows are on disk."""

    def __init__(self, *, max_queued: int = 1024) -> None:
        self._orders: queue.Queue[_Order | None] = queue.Queue(max_queued)
        self._poison: BaseException | None = None
        self._closed = False
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
        self._thread.start()

    def submit(self, store: PartitionStore, action: Callable[[PartitionStore], T]) -> Future[T]:
        """Queue `action`; blocks while the queue is full. An action's error is its future's.

        Once anything has failed (a full disk) a file may end in half a row, so nothing more is
        promised: that first error is the answer to every later order.
        """
        order = _Order(store, action, Future())
        with self._gate:  # nothing may follow the end: it would never be carried out
            if self._closed:
                raise RuntimeError("the committer is closed")
            self._orders.put(order)
        return order.future

    def close(self) -> None:
        """Finish what is queued and end the thread. May be repeated."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            orders = [self._orders.get()]
            while len(orders) < MAX_BATCH:
                try:
                    orders.append(self._orders.get_nowait())
                except queue.Empty:
                    break
            ending = None in orders
            self._carry_out([o for o in orders if o is not None])

    def _carry_out(self, orders: list[_Order]) -> None:
        applied: dict[int, tuple[PartitionStore, list[_Order]]] = {}
        for order in orders:
            if not order.future.set_running_or_notify_cancel():
                continue
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
            else:
                for order in done:
                    order.future.set_result(order.result)

    def _fail(self, order: _Order, error: BaseException) -> None:
        self._poison = self._poison or error
        order.future.set_exception(error)
