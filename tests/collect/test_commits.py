"""Commits for coroutines: durable on return, not for those who went away, failed after a failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from datagen.collect.commits import Commits
from datagen.store.group_commit import GroupCommitter
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import PartitionLayout
from datagen.store.partition import Outcome, PartitionStore
from tests.store.rows import collect, open_store, prompt_id, reject


@pytest.fixture
def committer() -> Iterator[GroupCommitter]:
    committer = GroupCommitter()
    yield committer
    committer.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PartitionStore]:
    store = open_store(tmp_path)
    yield store
    store.close()


def journaled(root: Path) -> int:
    return int((read_journal(PartitionLayout(root).journal)["kind"] == Kind.STATES).sum())


async def test_on_return_the_row_is_on_disk(
    store: PartitionStore, committer: GroupCommitter, tmp_path: Path
) -> None:
    commits = Commits(committer)
    await asyncio.gather(*(commits.run(store, partial(collect, number=n)) for n in range(20)))
    assert journaled(tmp_path) == 20
    assert await commits.run(store, lambda s: s.outcome(prompt_id(7), 0)) is Outcome.COLLECTED


async def test_what_is_given_up_before_its_batch_is_not_carried_out_and_frees_its_place(
    store: PartitionStore, committer: GroupCommitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datagen.collect.commits.MAX_QUEUED", 2)
    commits = Commits(committer)
    started, gate = threading.Event(), threading.Event()

    def wait(_: PartitionStore) -> None:
        started.set()
        gate.wait(60)

    first = asyncio.create_task(commits.run(store, wait))
    await asyncio.to_thread(started.wait, 60)
    given_up = asyncio.create_task(commits.run(store, partial(collect, number=0)))
    later = asyncio.create_task(commits.run(store, partial(collect, number=1)))
    await asyncio.sleep(0.01)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    gate.set()
    await asyncio.wait_for(asyncio.gather(first, later), 60)
    assert store.outcome(prompt_id(0), 0) is Outcome.PENDING
    assert store.outcome(prompt_id(1), 0) is Outcome.COLLECTED


async def test_an_error_is_raised_where_it_belongs_and_from_then_on(
    store: PartitionStore, committer: GroupCommitter
) -> None:
    commits = Commits(committer)
    await commits.run(store, partial(reject, number=0))
    with pytest.raises(ValueError, match=r".") as first:
        await commits.run(store, partial(reject, number=0))
    with pytest.raises(ValueError, match=r".") as second:
        await commits.run(store, partial(collect, number=1))
    assert first.value is second.value


async def test_of_several_writers_a_store_keeps_to_one_and_does_not_wait_for_another(
    tmp_path: Path,
) -> None:
    writers = [GroupCommitter(), GroupCommitter()]
    stores = [open_store(tmp_path / str(i)) for i in range(4)]
    commits, gate = Commits(*writers), threading.Event()

    def thread(_: PartitionStore) -> int:
        return threading.get_ident()

    of = [[await commits.run(s, thread) for _ in range(3)] for s in stores]
    assert [len(set(threads)) for threads in of] == [1] * 4
    assert {threads[0] for threads in of[:2]} == {threads[0] for threads in of[2:]}
    assert of[0][0] != of[1][0]
    held = asyncio.create_task(commits.run(stores[0], lambda _: gate.wait(60)))
    await asyncio.wait_for(commits.run(stores[1], partial(collect, number=0)), 60)
    assert journaled(tmp_path / "1") == 1
    assert not held.done()
    gate.set()
    await held
    for writer in writers:
        writer.close()
    for store in stores:
        store.close()


async def test_rows_that_wait_for_the_disk_make_it_crowded_until_they_are_durable(
    store: PartitionStore, committer: GroupCommitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datagen.collect.commits.MAX_WAITING", 3)
    commits = Commits(committer)
    syncing, synced = threading.Event(), threading.Event()

    def slow(_: PartitionStore) -> None:
        syncing.set()
        synced.wait(60)

    rows = [asyncio.create_task(commits.run(store, slow))]
    await asyncio.to_thread(syncing.wait, 60)
    rows += [asyncio.create_task(commits.run(store, partial(collect, number=n))) for n in range(2)]
    await asyncio.sleep(0)
    assert commits.crowded
    given_up = asyncio.create_task(commits.run(store, partial(collect, number=2)))
    await asyncio.sleep(0)
    given_up.cancel()
    synced.set()
    await asyncio.wait_for(asyncio.gather(*rows), 60)
    assert not commits.crowded
