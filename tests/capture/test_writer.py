"""The spool writer of an engine: bounded, atomic, private; and the chunks that are put together for it."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datagen.capture.assembly import ABANDONED_S, Assembler, RowsMissing
from datagen.capture.spool import PROTOCOL, SpoolError, read_spool, spool_path, sweep
from datagen.capture.writer import (
    MIB,
    Limits,
    RowFormat,
    SpoolBusy,
    SpoolWriter,
    limits_from_environment,
)

FORMAT = RowFormat((1, 3), 4, "post", "BF16", "test 1")
SMALL = Limits(pending_bytes=1000, min_free_bytes=1, threads=1, wait_s=0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rows(n: int, seed: int = 0) -> memoryview:
    return memoryview(bytes((i * 7 + seed) % 256 for i in range(n * FORMAT.row_bytes)))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SpoolWriter]:
    writer = SpoolWriter(tmp_path / "spool", SMALL)
    yield writer
    writer.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def assembler(writer: SpoolWriter, clock: Clock) -> Assembler:
    return Assembler(writer, FORMAT, clock)


def wait_until_written(writer: SpoolWriter) -> None:
    deadline = time.monotonic() + 60
    while writer.pending_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_chunks_of_two_requests_become_two_whole_captures(
    writer: SpoolWriter, assembler: Assembler
) -> None:
    a, b = rows(5, 1), rows(2, 9)
    size = FORMAT.row_bytes
    ids_a, ids_b = [10, 11, 12, 13, 14], [7, 8]
    assert assembler.add("a", a[: 3 * size], generation=0, ended=False, input_ids=ids_a) is None
    assert assembler.add("b", b, generation=0, ended=True, input_ids=ids_b) is not None
    note = assembler.add("a", a[3 * size :], generation=0, ended=True, input_ids=ids_a)
    assert note is not None
    assert (note["rows"], note["chunks"], note["protocol"]) == (5, 2, PROTOCOL)
    wait_until_written(writer)
    spooled = read_spool(spool_path(writer.directory, "a"))
    assert bytes(spooled.rows) == bytes(a)
    assert spooled.input_ids == tuple(ids_a)
    assert (spooled.boundaries, spooled.hidden, spooled.rid) == ((1, 3), 4, "a")
    assert bytes(read_spool(spool_path(writer.directory, "b")).rows) == bytes(b)
    assert stat.S_IMODE(spool_path(writer.directory, "a").stat().st_mode) == 0o600


def test_rows_that_do_not_match_the_tokens_are_refused_and_given_back(
    writer: SpoolWriter, assembler: Assembler
) -> None:
    with pytest.raises(RowsMissing, match="1 rows for 3 tokens: a cached prefix"):
        assembler.add("r", rows(1), generation=0, ended=True, input_ids=[1, 2, 3])
    assert (assembler.in_flight, writer.pending_bytes) == (0, 0)


def test_a_capture_without_tokens_is_refused_and_given_back(
    assembler: Assembler, writer: SpoolWriter
) -> None:
    with pytest.raises(SpoolError, match="a: a capture of 0 tokens"):
        assembler.add("a", rows(0), generation=0, ended=True, input_ids=[])
    assert (assembler.in_flight, writer.pending_bytes) == (0, 0)
    assert not os.listdir(writer.directory)


def test_a_restarted_prefill_forgets_the_rows_of_its_first_start(
    writer: SpoolWriter, assembler: Assembler
) -> None:
    assembler.add("r", rows(2, 1), generation=0, ended=False, input_ids=[1, 2, 3])
    note = assembler.add("r", rows(3, 2), generation=1, ended=True, input_ids=[1, 2, 3])
    assert note is not None
    wait_until_written(writer)
    assert bytes(read_spool(spool_path(writer.directory, "r")).rows) == bytes(rows(3, 2))


def test_what_was_aborted_between_chunks_is_given_back(
    writer: SpoolWriter, assembler: Assembler, clock: Clock
) -> None:
    assembler.add("dropped", rows(2), generation=0, ended=False, input_ids=[1, 2, 3])
    assembler.drop("dropped")
    assembler.drop("unknown")
    assert writer.pending_bytes == 0
    assembler.add("silent", rows(2), generation=0, ended=False, input_ids=[1, 2, 3])
    clock.now += ABANDONED_S + 1
    assembler.add("other", rows(1), generation=0, ended=True, input_ids=[1])
    wait_until_written(writer)
    assert assembler.in_flight == 0


def test_too_much_pending_blocks_then_refuses_and_room_lets_it_pass(writer: SpoolWriter) -> None:
    writer.hold(900)
    with pytest.raises(SpoolBusy, match="900 bytes of captures still wait"):
        writer.hold(200)
    slow = SpoolWriter(writer.directory, Limits(pending_bytes=1000, wait_s=30, threads=1))
    slow.hold(900)
    passed = threading.Thread(target=slow.hold, args=(200,), daemon=True)
    passed.start()
    passed.join(0.05)
    assert passed.is_alive()
    slow.release(900)
    passed.join(60)
    assert not passed.is_alive()
    assert slow.pending_bytes == 200
    slow.close()


def test_a_capture_larger_than_the_bound_passes_alone(
    writer: SpoolWriter, assembler: Assembler
) -> None:
    ids = list(range(60))  # 1440 bytes of rows where 1000 may wait
    first = rows(30)
    assert assembler.add("big", first, generation=0, ended=False, input_ids=ids) is None
    assert assembler.add("big", rows(30), generation=0, ended=True, input_ids=ids) is not None
    wait_until_written(writer)
    assert read_spool(spool_path(writer.directory, "big")).n_tokens == 60


def test_a_spool_without_room_refuses_and_gives_back(tmp_path: Path, clock: Clock) -> None:
    writer = SpoolWriter(tmp_path / "spool", Limits(min_free_bytes=1 << 60, threads=1))
    assembler = Assembler(writer, FORMAT, clock)
    with pytest.raises(SpoolBusy, match="bytes free in the spool"):
        assembler.add("r", rows(1), generation=0, ended=True, input_ids=[1])
    assert (assembler.in_flight, writer.pending_bytes) == (0, 0)
    writer.close()
    assert not os.listdir(tmp_path / "spool")


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(0o777)
    with pytest.raises(SpoolError, match="others can write"):
        SpoolWriter(tmp_path / "spool", SMALL)


def test_a_write_that_fails_leaves_a_private_note_and_gives_back(writer: SpoolWriter) -> None:
    path = spool_path(writer.directory, "r")
    path.mkdir()  # the rename cannot replace a directory
    writer.hold(FORMAT.row_bytes)
    writer.publish("r", [rows(1)], 1, b"\x01\0\0\0", FORMAT)
    wait_until_written(writer)
    note = path.with_name(path.name + ".err")
    assert "Error" in note.read_text()
    assert stat.S_IMODE(note.stat().st_mode) == 0o600


def test_a_sweep_takes_stale_captures_and_half_written_ones_and_nothing_else(
    tmp_path: Path,
) -> None:
    name = "0123456789abcdef" * 2 + ".safetensors"
    now = time.time()
    ages = {name: 1000, name + ".err": 1000, name + ".7.tmp": 100, "notes.txt": 9999}
    fresh = {"f" * 32 + ".safetensors": 800, "f" * 32 + ".safetensors.12.tmp": 30}
    for file, age in (ages | fresh).items():
        (tmp_path / file).write_bytes(b"1234")
        os.utime(tmp_path / file, (now - age, now - age))
    swept = sweep(tmp_path, older_than_s=900, now=now)
    assert (swept.n_files, swept.n_bytes) == (3, 12)
    assert set(os.listdir(tmp_path)) == {"notes.txt", *fresh}


def test_a_running_server_sweeps_its_spool_by_itself(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "spool", Limits(stale_s=0.2, threads=1))
    left = spool_path(tmp_path / "spool", "nobody came")
    left.write_bytes(b"x")
    deadline = time.monotonic() + 60
    while left.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    writer.close()


def test_limits_come_from_the_environment() -> None:
    found = limits_from_environment(
        {"DATAGEN_CAPTURE_PENDING_MIB": "2", "DATAGEN_CAPTURE_WRITERS": "7"}
    )
    assert (found.pending_bytes, found.threads, found.wait_s) == (2 * MIB, 7, Limits().wait_s)
    with pytest.raises(ValueError, match=r"DATAGEN_CAPTURE_TTL_S='-1' is no positive number"):
        limits_from_environment({"DATAGEN_CAPTURE_TTL_S": "-1"})
