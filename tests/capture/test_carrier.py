"""Small captures written by processes of their own: whole, private, counted, and never lost in silence."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datagen.capture.carried import ANSWER, Job, message, parts_of, serve
from datagen.capture.carrier import SLOTS, Carrier
from datagen.capture.spool import read_spool, spool_path, write_all
from datagen.capture.writer import Limits, RowFormat, SpoolWriter

FORMAT = RowFormat((1, 3), 4, "post", "BF16", "test 1")
LIMITS = Limits(pending_bytes=1 << 20, min_free_bytes=1, threads=1, carried_bytes=1000)


def rows(n: int, seed: int = 0) -> memoryview:
    return memoryview(bytes((i * 7 + seed) % 256 for i in range(n * FORMAT.row_bytes)))


def job(path: Path, n: int, seed: int = 0) -> Job:
    data = rows(n, seed)
    ids = b"".join(i.to_bytes(4, "little") for i in range(n))
    cut = (n // 2) * FORMAT.row_bytes
    return Job(
        str(path), [data[:cut], data[cut:]], n, FORMAT.width, FORMAT.dtype, ids,
        FORMAT.metadata(path.name), data.nbytes,
    )  # fmt: skip


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Told:
    """What a carrier says is done."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def __call__(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes

    def wait_for(self, n_bytes: int) -> None:
        wait_until(lambda: self.n_bytes >= n_bytes)
        assert self.n_bytes == n_bytes


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def carrier(told: Told) -> Iterator[Carrier]:
    carrier = Carrier(told)
    yield carrier
    carrier.close()


def test_captures_arrive_whole_and_private_and_are_counted(
    carrier: Carrier, told: Told, tmp_path: Path
) -> None:
    jobs = [job(tmp_path / f"{i}.safetensors", 1 + i % 5, i) for i in range(40)]
    for number, each in enumerate(jobs):
        carrier.put(each)
        if number == 20:
            time.sleep(0.1)  # more than one message, and a pause
    told.wait_for(sum(j.n_bytes for j in jobs))
    for number, each in enumerate(jobs):
        path = Path(each.path)
        spooled = read_spool(path)
        assert bytes(spooled.rows) == bytes(rows(1 + number % 5, number))
        assert spooled.input_ids == tuple(range(1 + number % 5))
        assert (spooled.rid, spooled.boundaries, spooled.hidden) == (path.name, (1, 3), 4)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(os.listdir(tmp_path)) == 40


def test_a_write_that_fails_leaves_a_note_and_the_others_go_on(
    carrier: Carrier, told: Told, tmp_path: Path
) -> None:
    bad, good = tmp_path / "bad.safetensors", tmp_path / "good.safetensors"
    bad.mkdir()
    carrier.put(job(bad, 2))
    carrier.put(job(good, 3))
    told.wait_for(5 * FORMAT.row_bytes)
    assert "Error" in (tmp_path / "bad.safetensors.err").read_text()
    assert read_spool(good).n_tokens == 3


def test_when_a_process_dies_what_it_had_is_noted_and_what_follows_is_written(
    carrier: Carrier, told: Told, tmp_path: Path
) -> None:
    children = [p.child for p in carrier._processes]
    for child in children:
        os.kill(child.pid, signal.SIGSTOP)  # takes, and does not answer
    lost = tmp_path / "lost.safetensors"
    carrier.put(job(lost, 4))
    wait_until(lambda: any(p.under_way for p in carrier._processes))
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    told.wait_for(4 * FORMAT.row_bytes)
    assert "is gone" in (tmp_path / "lost.safetensors.err").read_text()
    assert not carrier.alive
    carrier.put(job(tmp_path / "later.safetensors", 2))
    told.wait_for(6 * FORMAT.row_bytes)
    assert read_spool(tmp_path / "later.safetensors").n_tokens == 2


def test_closing_publishes_what_is_queued_and_ends_the_processes(
    told: Told, tmp_path: Path
) -> None:
    carrier = Carrier(told, processes=1)
    for i in range(5):
        carrier.put(job(tmp_path / f"{i}.safetensors", 3))
    carrier.close()
    assert told.n_bytes == 5 * 3 * FORMAT.row_bytes
    assert [p.child.returncode for p in carrier._processes] == [0]
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


@pytest.fixture
def slot() -> Iterator[int]:
    fd = os.memfd_create("slot")
    yield fd
    os.close(fd)


def served(said: bytes, slot: int) -> list[int]:
    """What is answered to `said`, then an end."""
    source, out = os.pipe()
    heard, answers = os.pipe()
    os.write(out, said)
    os.close(out)
    serve(source, answers, [slot])
    os.close(answers)
    told = [n for (n,) in ANSWER.iter_unpack(os.read(heard, 1000))]
    os.close(source)
    os.close(heard)
    return told


def test_a_message_that_ends_in_its_middle_leaves_no_file(tmp_path: Path, slot: int) -> None:
    whole, cut = [job(tmp_path / "a.safetensors", 3)], [job(tmp_path / "b.safetensors", 3)]
    write_all(slot, parts_of(whole), 0)
    assert served(message(whole, 0) + message(cut, 0)[:-1], slot) == [3 * FORMAT.row_bytes]
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_more_is_handed_over_than_fits_in_the_shared_memory(told: Told, tmp_path: Path) -> None:
    """A process that holds all its slots is waited for; each is filled again, with more and with less."""
    carrier = Carrier(told, processes=1)
    process = carrier._processes[0]
    jobs = [job(tmp_path / f"{i}.safetensors", 1 + 7 * i % 30, i) for i in range(4 * SLOTS)]
    try:
        warm_up(carrier, told, tmp_path)
        os.kill(process.child.pid, signal.SIGSTOP)
        for each in jobs:
            carrier.put(each)
            while process.free and carrier._jobs:
                time.sleep(0.005)
        wait_until(lambda: not process.free)
        assert len(process.under_way) < len(jobs)
        assert told.n_bytes == FORMAT.row_bytes
        os.kill(process.child.pid, signal.SIGCONT)
        told.wait_for(FORMAT.row_bytes + sum(j.n_bytes for j in jobs))
        assert carrier.alive
    finally:
        carrier.close()
    for each in jobs:
        assert bytes(read_spool(Path(each.path)).rows) == b"".join(each.pieces)


def test_without_memory_to_share_captures_are_written_here(told: Told, tmp_path: Path) -> None:
    carrier = Carrier(told, processes=1)
    try:
        warm_up(carrier, told, tmp_path)
        carrier._processes[0].slots[carrier._processes[0].free[-1]] = os.open(tmp_path, os.O_RDONLY)
        carrier.put(job(tmp_path / "a.safetensors", 3))
        told.wait_for(4 * FORMAT.row_bytes)
        assert not carrier.alive
        assert read_spool(tmp_path / "a.safetensors").n_tokens == 3
    finally:
        carrier.close()


def test_a_process_whose_pipe_somebody_else_holds_open_is_ended_too(
    told: Told, tmp_path: Path
) -> None:
    carrier = Carrier(told, processes=1, hung_s=10.0)
    warm_up(carrier, told, tmp_path)
    child = carrier._processes[0].child
    assert child.stdin is not None
    held = os.dup(child.stdin.fileno())  # as a fork of this process would
    try:
        carrier._hung_s = 0.1
        carrier.close()
    finally:
        os.close(held)
    assert child.returncode == -signal.SIGKILL
    assert read_spool(tmp_path / "warm-1.safetensors").n_tokens == 1


def test_a_writer_carries_small_captures_and_writes_large_ones_itself(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "spool", LIMITS)
    for rid, n in (("small", 4), ("large", 60)):
        writer.hold(n * FORMAT.row_bytes)
        writer.publish(rid, [rows(n)], n, bytes(4 * n), FORMAT)
    wait_until(lambda: not writer.pending_bytes)
    for rid, n in (("small", 4), ("large", 60)):
        assert bytes(read_spool(spool_path(writer.directory, rid)).rows) == bytes(rows(n))
    writer.close()


def warm_up(carrier: Carrier, told: Told, folder: Path) -> None:
    """Every process has started, which takes a busy machine seconds: each has written one row."""
    for number in range(1, len(carrier._processes) + 1):
        carrier.put(job(folder / f"warm-{number}.safetensors", 1))
        told.wait_for(number * FORMAT.row_bytes)


@pytest.mark.parametrize("n", [4, 150_000])
def test_a_process_that_hangs_is_ended_and_what_it_had_is_noted(
    told: Told, tmp_path: Path, n: int
) -> None:
    """With a small capture and with one of megabytes."""
    carrier = Carrier(told, hung_s=10.0)
    hung, sound = carrier._processes
    try:
        warm_up(carrier, told, tmp_path)
        carrier._hung_s = 2.0
        os.kill(hung.child.pid, signal.SIGSTOP)
        held, other = job(tmp_path / "held.safetensors", n), job(tmp_path / "o.safetensors", 3)
        carrier.put(held)
        told.wait_for(2 * FORMAT.row_bytes + held.n_bytes)
        assert hung.child.returncode == -signal.SIGKILL
        note = (tmp_path / "held.safetensors.err").read_text()
        assert "has answered nothing for 2 s" in note
        carrier.put(other)
        told.wait_for(2 * FORMAT.row_bytes + held.n_bytes + other.n_bytes)
        assert read_spool(tmp_path / "o.safetensors").n_tokens == 3
    finally:
        carrier.close()
    assert sound.child.returncode == 0


def test_a_process_that_is_slow_but_answers_does_not_hang(told: Told, tmp_path: Path) -> None:
    carrier = Carrier(told, processes=1, hung_s=10.0)
    child = carrier._processes[0].child
    jobs = [job(tmp_path / f"{i}.safetensors", 3) for i in range(6)]
    stopped_s = 0.0
    try:
        warm_up(carrier, told, tmp_path)
        carrier._hung_s = 3.0
        for number, each in enumerate(jobs, 1):
            began = time.monotonic()
            os.kill(child.pid, signal.SIGSTOP)
            carrier.put(each)
            time.sleep(0.6)
            os.kill(child.pid, signal.SIGCONT)
            stopped_s += time.monotonic() - began
            told.wait_for((1 + 3 * number) * FORMAT.row_bytes)
        assert stopped_s > carrier._hung_s
        assert carrier.alive
    finally:
        carrier.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == 6 + 1


def test_a_message_that_takes_long_is_answered_in_parts(
    tmp_path: Path, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datagen.capture.carried.TELL_EVERY_S", 0.0)
    jobs = [job(tmp_path / f"{i}.safetensors", 1 + i) for i in range(3)]
    write_all(slot, parts_of(jobs), 0)
    told = served(message(jobs, 0), slot)
    assert [n for n in told if n] == [FORMAT.row_bytes * n for n in (1, 2, 3)]
