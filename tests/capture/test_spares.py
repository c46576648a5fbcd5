"""Captures written over the memory of earlier ones are whole, and no more is kept than was said."""

from __future__ import annotations

import os
import stat
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from datagen.capture import spares
from datagen.capture.spool import HALF_WRITTEN_S, discard, read_spool, spool_path, sweep
from datagen.capture.writer import Limits, RowFormat, SpoolWriter
from datagen.target.capture import rows_of
from datagen.target.states import Captured

WIDE = RowFormat((1, 3, 5), 7168, "post", "BF16", "test 1")
LEAST = -(-spares.LEAST_BYTES // WIDE.row_bytes)  # tokens of the smallest capture that gains


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SpoolWriter]:
    writer = SpoolWriter(tmp_path / "spool", Limits(min_free_bytes=1))
    yield writer
    writer.close()


def publish(writer: SpoolWriter, rid: str, n: int) -> Path:
    """A capture of `n` rows, each row of one value of its own."""
    seed = int.from_bytes(rid.encode(), "little") % 997
    values = (np.arange(n, dtype=np.uint16)[:, None] + np.uint16(seed)).repeat(WIDE.width, 1)
    piece = memoryview(values).cast("B")
    writer.hold(piece.nbytes)
    note = writer.publish(rid, [piece], n, np.arange(n, dtype=np.int32).tobytes(), WIDE)
    path, deadline = Path(note["path"]), time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return path


def read(path: Path, rid: str, n: int) -> Captured:
    spooled = read_spool(path)  # the whole is summed
    assert (spooled.rid, spooled.n_tokens, len(spooled.input_ids)) == (rid, n, n)
    rows = rows_of(spooled)
    assert (rows[:, 0] == rows[:, -1]).all()
    assert int(rows[-1, 0]) - int(rows[0, 0]) == n - 1
    return Captured(rows, path, spares=True)


@pytest.mark.parametrize("second", [LEAST, LEAST + 40], ids=["shorter", "longer"])
def test_a_capture_is_written_over_the_memory_of_one_that_was_handed_back(
    writer: SpoolWriter, second: int
) -> None:
    first = publish(writer, "one", LEAST + 20)
    inode = first.stat().st_ino
    read(first, "one", LEAST + 20).hand_back(1)
    assert [p.name for p in writer.directory.iterdir()] == ["spare-00"]
    path = publish(writer, "two", second)
    assert path.stat().st_ino == inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read(path, "two", second)
    assert os.listdir(writer.directory) == [path.name]


def test_what_is_discarded_stays_as_it_was_read(writer: SpoolWriter) -> None:
    path = publish(writer, "one", LEAST)
    rows = rows_of(read_spool(path))
    before = rows.copy()
    discard(path)
    read(publish(writer, "two", LEAST), "two", LEAST)
    assert np.array_equal(rows, before)


def test_no_more_is_kept_than_there_are_names_and_nothing_small_or_huge(
    writer: SpoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "SPARES", 3)
    paths = [publish(writer, f"r{i}", LEAST) for i in range(5)]
    for path in paths:
        spares.hand_back(path)
        spares.hand_back(path)  # an absent one is fine
    assert sorted(os.listdir(writer.directory)) == ["spare-00", "spare-01", "spare-02"]
    spares.drop(writer.directory)
    small = publish(writer, "small", LEAST - 1)
    spares.hand_back(small)
    monkeypatch.setattr(spares, "MOST_BYTES", spares.LEAST_BYTES)
    spares.hand_back(publish(writer, "huge", LEAST + 1))
    assert not os.listdir(writer.directory)


def test_a_server_that_takes_no_spares_gets_none(writer: SpoolWriter) -> None:
    path = publish(writer, "one", LEAST)
    captured = read(path, "one", LEAST)
    captured.spares = False
    captured.hand_back(spares.SPARES)
    captured = read(publish(writer, "two", LEAST), "two", LEAST)
    captured.hand_back(0)
    assert not os.listdir(writer.directory)


def test_where_none_come_one_name_is_tried(
    writer: SpoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    utime = os.utime

    def noted(path: str) -> None:
        tried.append(path)
        utime(path)

    monkeypatch.setattr("datagen.capture.spares.os.utime", noted)
    monkeypatch.setattr(spares, "_found_at", float("-inf"))
    for rid in ("one", "two"):
        publish(writer, rid, LEAST)
    assert [name[-8:] for name in tried] == ["spare-00"] * 2
    for rid in ("one", "two"):
        spares.hand_back(spool_path(writer.directory, rid))
    for rid in (
        "three",
        "four",
    ):  # the first shows that they come, and the second is at another name
        read(publish(writer, rid, LEAST), rid, LEAST)
    assert not list(writer.directory.glob("spare-*"))


def test_only_files_of_its_own_are_taken_and_they_become_private(
    writer: SpoolWriter, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    (writer.directory / "spare-00").symlink_to(elsewhere)
    values = np.zeros((LEAST, WIDE.width), np.uint16)
    writer.hold(values.nbytes)
    note = writer.publish("one", [memoryview(values)], LEAST, bytes(4 * LEAST), WIDE)
    failed, deadline = Path(note["path"] + ".err"), time.monotonic() + 60
    while not failed.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert elsewhere.read_bytes() == b"mine"
    path = publish(writer, "two", LEAST)
    path.chmod(0o644)
    spares.hand_back(path)
    assert stat.S_IMODE(publish(writer, "three", LEAST).stat().st_mode) == 0o600


def test_a_spare_that_cannot_be_removed_is_told_and_stops_nothing(
    writer: SpoolWriter, caplog: pytest.LogCaptureFixture
) -> None:
    (writer.directory / "spare-00").mkdir()
    (writer.directory / "spare-03").touch()
    spares.drop(writer.directory)
    assert os.listdir(writer.directory) == ["spare-00"]
    assert "spare-00" in caplog.text


def test_in_huge_pages_nothing_is_kept(
    writer: SpoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(writer, "one", LEAST)
    as_block = {"st_size": path.stat().st_size, "st_blksize": 2 << 20}
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(**as_block))
    spares.hand_back(path)
    assert not os.listdir(writer.directory)


def test_small_captures_leave_spares_to_those_that_gain(writer: SpoolWriter) -> None:
    spares.hand_back(publish(writer, "large", LEAST))
    path = publish(writer, "small", 1)
    assert sorted(os.listdir(writer.directory)) == sorted(["spare-00", path.name])


def test_many_readers_and_writers_share_the_spares_and_every_capture_is_whole(
    writer: SpoolWriter,
) -> None:
    def one(i: int) -> None:
        n = LEAST + i * 7 % 30
        captured = read(publish(writer, f"r{i}", n), f"r{i}", n)
        captured.hand_back(spares.SPARES)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(120)))
    left = os.listdir(writer.directory)
    assert left
    assert all(name.startswith("spare-") for name in left)
    assert len(left) <= 8
    writer.close()
    assert not os.listdir(writer.directory)


def test_spares_make_room_before_a_capture_is_refused(
    writer: SpoolWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares.hand_back(publish(writer, "one", LEAST))
    free = namedtuple("free", ["f_bavail", "f_frsize"])

    def room(directory: Path) -> free:
        return free(0 if any(p.name == "spare-00" for p in directory.iterdir()) else 1 << 20, 4096)

    monkeypatch.setattr("datagen.capture.writer.os.statvfs", room)
    writer._room_known_until = 0.0
    read(publish(writer, "two", LEAST), "two", LEAST)


def test_a_spare_that_nobody_takes_is_swept(writer: SpoolWriter) -> None:
    path = publish(writer, "one", LEAST)
    spares.hand_back(path)
    now = time.time()
    assert sweep(writer.directory, older_than_s=900, now=now + HALF_WRITTEN_S - 5).n_files == 0
    assert sweep(writer.directory, older_than_s=900, now=now + HALF_WRITTEN_S + 5).n_files == 1
    assert not os.listdir(writer.directory)


def test_a_writer_that_dies_over_a_spare_leaves_nothing_to_read(writer: SpoolWriter) -> None:
    """It writes under a temporary name, and what was read before is nobody's."""
    spares.hand_back(publish(writer, "one", LEAST))
    path = spool_path(writer.directory, "two")
    assert spares.take(f"{path}.7.tmp", spares.LEAST_BYTES)
    with open(f"{path}.7.tmp", "r+b") as file:  # and here it is killed
        file.write(b"half")
    assert not path.exists()
    read(publish(writer, "two", LEAST), "two", LEAST)
