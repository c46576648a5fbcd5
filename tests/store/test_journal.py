from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.errors import CorruptFile, FingerprintMismatch
from datagen.store.journal import SIZE, Entry, Journal, Kind, read_journal
from tests.store.rows import DIGEST, prompt_id


def entry(number: int, kind: Kind = Kind.STATES) -> Entry:
    return Entry(kind, prompt_id(number), number % 7, number // 3, 1000 + number, 42, 1, 1_700_000)


def written(path: Path, syncs: list[int]) -> list[Entry]:
    """A journal of `syncs` groups; returns its entries."""
    journal, _ = Journal.open(path, DIGEST)
    entries: list[Entry] = []
    for size in syncs:
        for _ in range(size):
            entries.append(entry(len(entries)))
            journal.append(entries[-1])
        journal.sync()
    journal.close()
    return entries


def as_entries(path: Path) -> list[Entry]:
    return [
        Entry(
            Kind(r["kind"]), bytes(r["prompt_id"]).hex(), int(r["turn"]), int(r["file"]),
            int(r["end"]), int(r["tokens"]), int(r["attempts"]), int(r["time_ms"]),
        )
        for r in read_journal(path, DIGEST)
    ]  # fmt: skip


@given(
    fields=st.lists(
        st.tuples(
            st.sampled_from(Kind), st.binary(min_size=32, max_size=32), st.integers(0, 0xFFFF),
            st.integers(0, 0xFFFF), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1),
            st.integers(0, 0xFFFF), st.integers(0, 2**63),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_any_record_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, fields: list[tuple[Kind, bytes, int, int, int, int, int, int]]
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("journal") / "journal.log"
    entries = [Entry(f[0], f[1].hex(), *f[2:]) for f in fields]
    journal, _ = Journal.open(path, DIGEST)
    for one in entries:
        journal.append(one)
    journal.sync()
    journal.close()
    assert as_entries(path) == entries


def test_what_was_appended_but_not_synced_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    journal, _ = Journal.open(path, DIGEST)
    journal.append(entry(0))
    journal.close()
    assert as_entries(path) == []


def test_cutting_the_file_at_every_byte_keeps_exactly_the_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    entries = written(path, [1, 2, 1])
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        journal, records = Journal.open(path, DIGEST)
        whole = max(0, length - SIZE) // SIZE
        assert len(records) == whole
        journal.append(entry(99))
        journal.sync()
        journal.close()
        assert as_entries(path) == [*entries[:whole], entry(99)]


def test_garbage_in_the_last_sync_is_cut_as_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    entries = written(path, [2, 3])
    raw = bytearray(path.read_bytes())
    third = SIZE + 2 * SIZE
    raw[third : third + SIZE] = bytes(SIZE)  # as a power cut may leave a block that never arrived
    path.write_bytes(raw)
    assert as_entries(path) == entries[:2]


@pytest.mark.parametrize("record", [0, 1, 2])
def test_damage_before_the_last_sync_is_refused_and_nothing_is_cut(
    tmp_path: Path, record: int
) -> None:
    path = tmp_path / "journal.log"
    written(path, [1, 2, 2])
    raw = bytearray(path.read_bytes())
    raw[SIZE + record * SIZE + 30] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptFile, match=f"record {record} is damaged") as caught:
        Journal.open(path, DIGEST)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("at", range(SIZE))
def test_a_flipped_bit_anywhere_in_the_header_is_refused(tmp_path: Path, at: int) -> None:
    path = tmp_path / "journal.log"
    written(path, [1])
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)
    with pytest.raises(CorruptFile):
        read_journal(path, DIGEST)


def test_a_header_that_never_reached_the_disk_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    path.write_bytes(bytes(SIZE))
    assert len(written(path, [2])) == len(as_entries(path))


def test_a_journal_of_another_fingerprint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    written(path, [1])
    with pytest.raises(FingerprintMismatch, match="cdcdcdcdcdcd"):
        Journal.open(path, "cd" * 32)


def test_attempts_beyond_the_field_are_held_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    journal, _ = Journal.open(path, DIGEST)
    journal.append(Entry(Kind.REJECTED, prompt_id(0), 0, 0, 1, 0, 70_000, 0))
    journal.sync()
    journal.close()
    assert as_entries(path)[0].attempts == 0xFFFF


def test_a_reader_beside_a_writer_sees_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    journal, _ = Journal.open(path, DIGEST)
    for number in range(3):
        journal.append(entry(number))
        journal.sync()
        with open(path, "ab") as torn:
            torn.write(os.urandom(17))
        assert as_entries(path) == [entry(n) for n in range(number + 1)]
        os.truncate(path, path.stat().st_size - 17)
    journal.close()
    assert np.array_equal(read_journal(path)["opens_sync"], [1, 1, 1])
