"""Digests taken beside the writer are those of the bytes, in their order."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datagen.store import arrow_part, digests
from datagen.store.arrow_part import ArrowPart
from datagen.store.atomic import begin_writeback
from datagen.store.digests import LARGE_BYTES, Digests

SIZES = st.sampled_from([0, 1, 77, 4096, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 9])
STEPS = st.lists(st.one_of(SIZES.map(lambda n: ("piece", n)), st.just(("rows", 3))), max_size=12)


@given(STEPS)
def test_they_are_those_of_the_bytes_whatever_the_sizes(steps: list[tuple[str, int]]) -> None:
    found, whole, row, rows = Digests(), hashlib.sha256(), xxhash.xxh3_64(), []
    for i, (kind, n) in enumerate(steps):
        if kind == "rows":
            found.end_rows(n)
            rows += [row.hexdigest()] * n
            row.reset()
        else:
            piece = bytes([i + 1]) * n
            found.add(memoryview(piece))
            whole.update(piece)
            row.update(piece)
    assert found.sha256() == whole.hexdigest()
    assert found.rows() == tuple(rows)


def test_a_writer_waits_for_sums_that_fell_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded where summing is slower than writing."""
    going_on = threading.Event()
    summed = Digests._sum

    def slow(self: Digests, piece: memoryview) -> None:
        assert going_on.wait(60)
        summed(self, piece)

    monkeypatch.setattr(Digests, "_sum", slow)
    monkeypatch.setattr(digests, "MOST_WAITING_BYTES", 3 * LARGE_BYTES)
    pieces = [bytes([i]) * LARGE_BYTES for i in range(9)]
    added = []

    def write() -> str:
        found = Digests()
        for piece in pieces:
            found.add(memoryview(piece))
            added.append(piece)
        return found.sha256()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        with pytest.raises(TimeoutError):
            writer.result(0.3)
        assert len(added) == 4, "what is over the limit, and not a piece more"
        going_on.set()
        assert writer.result(60) == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_the_disk_may_begin_with_every_large_piece_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    def noted(fd: int, first: int, n_bytes: int) -> None:
        begun.append((first, n_bytes))
        assert os.fstat(fd).st_size == first + n_bytes, "written already, and at the end"
        begin_writeback(fd, first, n_bytes)

    monkeypatch.setattr(arrow_part, "begin_writeback", noted)
    column = pa.array([bytes(LARGE_BYTES), b"small", bytes(3 * LARGE_BYTES)], pa.large_binary())
    batch = pa.record_batch([column], names=["states"])
    writing = ArrowPart(tmp_path / "file.arrow", batch.schema)
    for _ in range(2):
        writing.append(batch)
    sealed = writing.seal()
    data = sealed.path.read_bytes()
    assert len(begun) == 2
    assert all(n >= 4 * LARGE_BYTES for _, n in begun)
    assert sealed.sha256 == hashlib.sha256(data).hexdigest()
    assert sealed.n_bytes == len(data)
    assert len(sealed.row_xxh3) == sealed.rows == 6


def test_beginning_is_a_hint_which_no_file_has_to_take() -> None:
    readable, writable = os.pipe()
    try:
        begin_writeback(writable, 0, 10)
    finally:
        os.close(readable)
        os.close(writable)


def test_what_waits_is_counted_over_all_files_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    going_on = threading.Event()
    summed = Digests._sum

    def slow(self: Digests, piece: memoryview) -> None:
        assert going_on.wait(60)
        summed(self, piece)

    monkeypatch.setattr(Digests, "_sum", slow)
    monkeypatch.setattr(digests, "MOST_WAITING_BYTES", 3 * LARGE_BYTES)
    files = [Digests() for _ in range(4)]
    for file in files:
        assert not digests.BACKLOG.full
        file.add(memoryview(bytes(LARGE_BYTES)))
    assert digests.BACKLOG.full
    with ThreadPoolExecutor(1) as pool:
        more = pool.submit(files[0].add, memoryview(bytes(LARGE_BYTES)))
        with pytest.raises(TimeoutError):
            more.result(0.2)
        going_on.set()
        more.result(60)
    assert len({file.sha256() for file in files}) == 2
    assert not digests.BACKLOG._bytes


def test_a_sum_that_fails_fails_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Digests, piece: memoryview) -> None:
        raise MemoryError

    monkeypatch.setattr(Digests, "_sum", broken)
    found = Digests()
    found.add(memoryview(bytes(LARGE_BYTES)))
    with pytest.raises(MemoryError):
        found.sha256()
    with pytest.raises(MemoryError):
        found.rows()
    with pytest.raises(MemoryError):
        found.add(memoryview(b"more"))
    assert not digests.BACKLOG._bytes


def test_a_file_whose_sum_failed_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pa.record_batch([pa.array([b"states"], pa.large_binary())], names=["states"])
    writing = ArrowPart(tmp_path / "file.arrow", batch.schema)
    writing.append(batch)

    def failed(self: Digests) -> str:
        raise MemoryError

    monkeypatch.setattr(Digests, "sha256", failed)
    with pytest.raises(MemoryError):
        writing.seal()
    writing.abandon()
    assert os.listdir(tmp_path) == ["file.arrow.part"]
