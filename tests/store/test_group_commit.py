from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from datagen.errors import StorageFull
from datagen.store.group_commit import GATHER_S, MAX_BATCH_BYTES, GroupCommitter, Order
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import PartitionLayout
from datagen.store.partition import Outcome, PartitionStore
from tests.store.rows import collect, open_store, prompt_id, reject


def submit(
    committer: GroupCommitter,
    store: PartitionStore,
    action: Callable[[PartitionStore], Any],
    n_bytes: int = 0,
) -> Future[Any]:
    """Order `action`; its future resolves once it is told."""
    future: Future[Any] = Future()

    def tell(orders: list[Order]) -> None:
        if orders[0].error is not None:
            future.set_exception(orders[0].error)
        else:
            future.set_result(orders[0].result)

    committer.put(Order(store, action, tell, n_bytes))
    return future


def collecting(number: int) -> Callable[[PartitionStore], None]:
    return partial(collect, number=number)


def journaled(root: Path) -> int:
    return int((read_journal(PartitionLayout(root).journal)["kind"] == Kind.STATES).sum())


def test_a_resolved_future_means_the_row_is_on_disk(tmp_path: Path) -> None:
    store, committer = open_store(tmp_path), GroupCommitter()
    for number in range(5):
        submit(committer, store, collecting(number)).result(timeout=60)
        assert journaled(tmp_path) == number + 1
    committer.close()
    store.close()


@pytest.mark.parametrize(
    ("rows", "n_bytes", "commits"),
    [(40, 0, 1), pytest.param(6, MAX_BATCH_BYTES // 2, 3, id="large rows, a few at a time")],
)
def test_rows_that_wait_together_share_a_commit(
    tmp_path: Path, rows: int, n_bytes: int, commits: int
) -> None:
    store, committer = open_store(tmp_path), GroupCommitter()
    started, gate = threading.Event(), threading.Event()

    def wait(_: PartitionStore) -> None:
        started.set()
        gate.wait(60)

    first = submit(committer, store, wait)
    started.wait(60)
    waiting = [submit(committer, store, collecting(n), n_bytes=n_bytes) for n in range(rows)]
    gate.set()
    for future in [first, *waiting]:
        future.result(timeout=60)
    committer.close()
    store.close()
    assert read_journal(PartitionLayout(tmp_path).journal)["opens_sync"].sum() == commits


def test_many_threads_and_partitions_lose_nothing(tmp_path: Path) -> None:
    stores = [open_store(tmp_path / str(i), shard_bytes=5000) for i in range(3)]
    committer = GroupCommitter(max_queued=8)
    futures: list[Future[None]] = []

    def enter(index: int, numbers: range) -> None:
        futures.extend(submit(committer, stores[index], collecting(n)) for n in numbers)

    threads = [
        threading.Thread(target=enter, args=(i, range(k * 10, k * 10 + 10)))
        for i in range(3)
        for k in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result(timeout=60)
    for index, store in enumerate(stores):
        submit(committer, store, lambda s: s.seal(30)).result(timeout=60)
        submit(committer, store, lambda s: s.close()).result(timeout=60)
        assert journaled(tmp_path / str(index)) == 30
    committer.close()


def test_the_results_of_actions_come_back(tmp_path: Path) -> None:
    store, committer = open_store(tmp_path), GroupCommitter()
    submit(committer, store, collecting(0)).result(timeout=60)
    answer = submit(committer, store, lambda s: s.response(prompt_id(0), 0)).result(timeout=60)
    assert answer.text.startswith("answer 0.0")
    committer.close()
    store.close()


def test_a_full_queue_holds_the_submitter_back(tmp_path: Path) -> None:
    store, committer = open_store(tmp_path), GroupCommitter(max_queued=1)
    started, gate = threading.Event(), threading.Event()

    def wait(_: PartitionStore) -> None:
        started.set()
        gate.wait(60)

    submit(committer, store, wait)
    started.wait(60)
    submit(committer, store, collecting(0))
    passed = threading.Event()

    def submit_one_more() -> None:
        submit(committer, store, collecting(1))
        passed.set()

    threading.Thread(target=submit_one_more).start()
    assert not passed.wait(0.1)
    gate.set()
    assert passed.wait(60)
    committer.close()
    assert journaled(tmp_path) == 2
    store.close()


def test_a_full_disk_fails_this_row_and_every_later_one_with_the_same_error(
    small_disk: Path,
) -> None:
    root = small_disk / "00000"
    store, committer = open_store(root), GroupCommitter()
    submit(committer, store, collecting(0)).result(timeout=60)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(2 << 20))
    errors: list[BaseException | None] = []
    for number in range(1, 20):
        error = submit(committer, store, collecting(number)).exception(timeout=60)
        if error is not None:
            errors.append(error)
    filler.unlink()
    errors.append(submit(committer, store, collecting(50)).exception(timeout=60))
    assert isinstance(errors[0], StorageFull)
    assert {id(e) for e in errors} == {id(errors[0])}
    committer.close()
    store.close()
    assert open_store(root).outcome(prompt_id(0), 0) is Outcome.COLLECTED


def test_an_action_that_fails_spares_the_rows_committed_with_it(tmp_path: Path) -> None:
    store, committer = open_store(tmp_path), GroupCommitter()
    started, gate = threading.Event(), threading.Event()

    def wait(_: PartitionStore) -> None:
        started.set()
        gate.wait(60)

    submit(committer, store, wait)
    started.wait(60)
    good = submit(committer, store, partial(reject, number=0))
    bad = submit(committer, store, partial(reject, number=0))
    late = submit(committer, store, collecting(1))
    gate.set()
    assert good.result(timeout=60) is None
    assert isinstance(bad.exception(timeout=60), ValueError)
    assert late.exception(timeout=60) is bad.exception()
    committer.close()
    store.close()
    assert open_store(tmp_path).counts().rejects == {"over_context": 1}


def test_a_cancelled_order_is_not_carried_out(tmp_path: Path) -> None:
    store, committer = open_store(tmp_path), GroupCommitter()
    started, gate = threading.Event(), threading.Event()

    def wait(_: PartitionStore) -> None:
        started.set()
        gate.wait(60)

    submit(committer, store, wait)
    started.wait(60)
    told: list[Order] = []
    order = Order(store, collecting(0), told.extend)
    committer.put(order)
    order.cancelled = True
    gate.set()
    committer.close()
    store.close()
    assert journaled(tmp_path) == 0
    assert not told


def test_the_rows_of_a_batch_are_not_kept_until_the_next(tmp_path: Path) -> None:
    class Rows:
        """Something that can be watched."""

    def take(_: Rows, store: PartitionStore) -> None:
        reject(store, 0)

    store, committer, rows = open_store(tmp_path), GroupCommitter(), Rows()
    alive = weakref.ref(rows)
    submit(committer, store, partial(take, rows)).result(timeout=60)
    del rows
    deadline = time.monotonic() + 60
    while alive() is not None:
        assert time.monotonic() < deadline, "the writer still holds them"
        time.sleep(0.01)
    committer.close()
    store.close()


def test_closing_carries_out_what_is_queued_and_refuses_what_comes_after(tmp_path: Path) -> None:
    store, committer = open_store(tmp_path), GroupCommitter()
    submit(committer, store, lambda _: time.sleep(0.05))
    futures = [submit(committer, store, collecting(n)) for n in range(30)]
    committer.close()
    committer.close()
    assert all(f.done() and f.exception() is None for f in futures)
    with pytest.raises(RuntimeError, match="closed"):
        submit(committer, store, collecting(99))
    store.close()
    assert journaled(tmp_path) == 30


def test_orders_with_one_teller_are_told_together_and_batches_keep_their_distance(
    tmp_path: Path,
) -> None:
    store, committer = open_store(tmp_path), GroupCommitter()
    told: list[list[Order]] = []
    began = time.monotonic()
    committer.put(Order(store, partial(reject, number=0), told.append))
    while not told:  # a first batch, however late the writer's thread is
        time.sleep(0.001)
    for number in range(1, 200):
        committer.put(Order(store, partial(reject, number=number), told.append))
        time.sleep(0.001)
    committer.close()
    batches = (time.monotonic() - began) / GATHER_S
    store.close()
    assert sum(map(len, told)) == 200
    assert all(order.error is None for orders in told for order in orders)
    assert 2 <= len(told) <= batches + 2
