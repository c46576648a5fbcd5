"""A partition's store, through every state that a kill can leave behind."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datagen.errors import CorruptFile, FingerprintMismatch, StorageFull
from datagen.store.arrow_part import sha256_of
from datagen.store.journal import SIZE, Kind, read_journal
from datagen.store.layout import PartitionLayout, part
from datagen.store.partition import Outcome, PartitionStore, PartitionSummary
from datagen.store.responses import Response, ResponsesReader
from datagen.store.states import ShardReader
from tests.store.rows import (
    SHARD_BYTES,
    collect,
    ids_of,
    open_store,
    prompt_id,
    reject,
    response,
    states_like,
    states_of,
)

NUMBERS = {prompt_id(number): number for number in range(100)}


@contextmanager
def opened(root: Path, *, shard_bytes: int = SHARD_BYTES) -> Iterator[PartitionStore]:
    store = open_store(root, shard_bytes=shard_bytes)
    try:
        yield store
    finally:
        store.close()


def kept(root: Path) -> dict[str, list[str]]:
    """Every row found in the sealed files, as the data says it, duplicates and all."""
    layout = PartitionLayout(root)
    found: dict[str, list[str]] = {"responses": [], "states": []}
    for number in layout.numbers("responses"):
        found["responses"] += [r.sample_id for r in ResponsesReader(layout.responses(number))]
    for number in layout.numbers("states"):
        shard = ShardReader(layout.states(number))
        for row in range(len(shard)):
            columns = shard.columns(row)
            answer = response(NUMBERS[columns.prompt_id], int(columns.sample_id.rpartition("-")[2]))
            assert np.array_equal(columns.input_ids, ids_of(answer))
            assert np.array_equal(
                columns.loss_mask, np.arange(columns.n_tokens) >= len(answer.context_ids)
            )
            assert np.array_equal(
                shard.states(row).reshape(columns.n_tokens, -1), states_of(answer)
            )
            found["states"].append(columns.sample_id)
    return found


def finish(root: Path, wanted: list[int], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Open, add what is missing, seal, and require the full set, once each."""
    with opened(root, shard_bytes=shard_bytes) as store:
        for number in wanted:
            collect(store, number)
            store.commit()
        summary = store.seal(len(wanted))
    samples = sorted(f"{prompt_id(n)}-0" for n in wanted)
    assert {k: sorted(v) for k, v in kept(root).items()} == {
        "responses": samples,
        "states": samples,
    }
    assert summary.collected == len(wanted)
    assert summary == PartitionSummary.load(PartitionLayout(root).summary)
    for file in (*summary.responses, *summary.states):
        assert sha256_of(root / file.name) == file.sha256
        assert (root / file.name).stat().st_size == file.n_bytes
    assert not list(root.glob("*.part")) + list(root.glob("*.recovered*"))


def test_rows_pass_from_pending_to_responded_to_collected(tmp_path: Path) -> None:
    answer = response(0)
    with opened(tmp_path) as store:
        assert store.outcome(answer.prompt_id, 0) is Outcome.PENDING
        store.add_response(answer)
        assert store.outcome(answer.prompt_id, 0) is Outcome.RESPONDED
        collect(store, 0)
        assert store.outcome(answer.prompt_id, 0) is Outcome.COLLECTED
        reject(store, 1)
        assert store.outcome(prompt_id(1), 0) is Outcome.REJECTED
        store.commit()
    with opened(tmp_path) as store:
        assert store.outcome(answer.prompt_id, 0) is Outcome.COLLECTED
        assert store.outcome(prompt_id(1), 0) is Outcome.REJECTED
        assert (store.counts().responded, store.counts().collected) == (1, 1)
        assert store.counts().rejects == {"over_context": 1}


def same(one: Response, other: Response) -> bool:
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in ((getattr(one, n), getattr(other, n)) for n in Response.__slots__)
    )


def test_a_response_is_read_back_from_the_open_file_a_sealed_one_and_after_a_restart(
    tmp_path: Path,
) -> None:
    answers = [response(n, spec_verify_ct=n, stop_reason_detail=None) for n in range(6)]
    with opened(tmp_path, shard_bytes=4000) as store:
        for answer in answers:
            store.add_response(answer)
            assert same(store.response(answer.prompt_id, 0), answer)
        assert len(PartitionLayout(tmp_path).numbers("responses")) > 1
        assert all(same(store.response(a.prompt_id, 0), a) for a in answers)
    with opened(tmp_path) as store:
        assert all(same(store.response(a.prompt_id, 0), a) for a in reversed(answers))


def test_text_that_utf8_cannot_hold_is_stored_with_the_replacement_character(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as store:
        store.add_response(response(0, text="a\ud800b \ud83d\ude00"))
        store.add_rejection(prompt_id(1), 0, "generate", "bad", "c\udfff", 1)
        assert (
            store.response(prompt_id(0), 0).text == "a\N{REPLACEMENT CHARACTER}b \N{GRINNING FACE}"
        )
    with opened(tmp_path) as store:
        assert store.outcome(prompt_id(0), 0) is Outcome.RESPONDED


def test_what_is_not_committed_is_gone_and_what_is_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        collect(store, 0)
        store.commit()
        collect(store, 1)
        reject(store, 2)
    with opened(tmp_path) as store:
        assert store.outcome(prompt_id(0), 0) is Outcome.COLLECTED
        assert store.outcome(prompt_id(1), 0) is Outcome.PENDING
        assert store.outcome(prompt_id(2), 0) is Outcome.PENDING
    finish(tmp_path, [0, 1])


def test_a_second_answer_second_states_or_second_rejection_is_refused(tmp_path: Path) -> None:
    answer = response(0)
    with opened(tmp_path) as store:
        collect(store, 0)
        reject(store, 1)
        with pytest.raises(ValueError, match="already"):
            store.add_response(answer)
        with pytest.raises(ValueError, match="already"):
            store.add_states(answer.prompt_id, 0, ids_of(answer), 3, states_of(answer))
        with pytest.raises(ValueError, match="already"):
            reject(store, 1)
    finish(tmp_path, [0])


@pytest.mark.parametrize(("cut", "n_context"), [(1, 3), (0, 0), (0, 1000)])
def test_states_of_the_wrong_shape_are_refused_and_spoil_nothing(
    tmp_path: Path, cut: int, n_context: int
) -> None:
    answer = response(0)
    with opened(tmp_path) as store:
        store.add_response(answer)
        with pytest.raises(ValueError, match="rows, context"):
            store.add_states(
                answer.prompt_id, 0, ids_of(answer), n_context, states_of(answer)[cut:]
            )
    finish(tmp_path, [0])


def test_shards_roll_at_their_size_and_each_is_a_file_of_its_own(tmp_path: Path) -> None:
    finish(tmp_path, list(range(8)), shard_bytes=4000)
    layout = PartitionLayout(tmp_path)
    assert len(layout.numbers("states")) >= 3
    summary = PartitionSummary.load(layout.summary)
    assert sum(f.rows for f in summary.states) == 8
    assert sum(f.tokens for f in summary.states) == sum(len(ids_of(response(n))) for n in range(8))


def test_every_cut_of_the_journal_keeps_the_rows_whose_records_are_whole(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with opened(whole) as store:
        for number in range(3):
            collect(store, number)
            store.commit()
        reject(store, 50)
        store.commit()
    length = PartitionLayout(whole).journal.stat().st_size
    for at in range(0, length + 1, 16):
        torn = tmp_path / f"torn-{at}"
        shutil.copytree(whole, torn)
        journal = PartitionLayout(torn).journal
        journal.write_bytes(journal.read_bytes()[:at])
        records = read_journal(journal)
        with opened(torn) as store:
            counts = store.counts()
            assert counts.responded == (records["kind"] == Kind.RESPONSE).sum()
            assert counts.collected == (records["kind"] == Kind.STATES).sum()
            assert sum(counts.rejects.values()) == (records["kind"] == Kind.REJECTED).sum()
        finish(torn, [0, 1, 2])
        shutil.rmtree(torn)


def test_a_journal_cut_within_a_sync_keeps_the_first_rows_of_its_batch(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with opened(whole) as store:
        for batch in ([0, 1], [2, 3, 4]):  # each commit writes its responses as one batch
            for number in batch:
                store.add_response(response(number))
            store.commit()
    length = PartitionLayout(whole).journal.stat().st_size
    for at in range(SIZE, length + 1, SIZE // 2):
        torn = tmp_path / f"torn-{at}"
        shutil.copytree(whole, torn)
        journal = PartitionLayout(torn).journal
        journal.write_bytes(journal.read_bytes()[:at])
        left = at // SIZE - 1
        with opened(torn) as store:
            assert store.counts().responded == left
            for number in range(left):
                assert same(store.response(prompt_id(number), 0), response(number))
        finish(torn, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("stride", [97, pytest.param(23, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["states-000.arrow.part", "responses-000.arrow.part"])
def test_every_tail_beyond_the_journaled_rows_is_dropped(
    tmp_path: Path, name: str, stride: int
) -> None:
    """A kill after the data and before the journal: the last rows torn at many bytes, and whole."""
    whole = tmp_path / "whole"
    with opened(whole) as store:
        collect(store, 0)
        store.commit()
        collect(store, 1)
        store.commit()
    journal = PartitionLayout(whole).journal
    kept_bytes = journal.read_bytes()[: SIZE + 2 * SIZE]
    kind = Kind.STATES if name.startswith("states") else Kind.RESPONSE
    records = read_journal(journal)
    first_end = int(records["end"][records["kind"] == kind][0])
    full = (whole / name).read_bytes()
    assert len(full) > first_end
    for at in [*range(first_end, len(full), stride), len(full)]:
        torn = tmp_path / "torn"
        shutil.copytree(whole, torn)
        (torn / name).write_bytes(full[:at])
        PartitionLayout(torn).journal.write_bytes(kept_bytes)
        with opened(torn) as store:
            assert store.counts().collected == 1
            assert store.counts().responded == 1
        finish(torn, [0, 1])
        shutil.rmtree(torn)


def test_data_shorter_than_the_journal_promises_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        collect(store, 0)
        store.commit()
    states = part(PartitionLayout(tmp_path).states(0))
    states.write_bytes(states.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match=r"states-000\.arrow\.part") as caught:
        open_store(tmp_path)
    assert "promises" in str(caught.value)


def test_a_journaled_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        collect(store, 0)
        store.commit()
    part(PartitionLayout(tmp_path).states(0)).unlink()
    with pytest.raises(CorruptFile, match="gone"):
        open_store(tmp_path)


def test_a_kill_between_the_footer_and_the_rename_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(2):
            collect(store, number)
        store.seal(2)
    layout = PartitionLayout(tmp_path)
    layout.summary.unlink()
    for path in (layout.states(0), layout.responses(0)):
        path.rename(part(path))
    finish(tmp_path, [0, 1, 2])


def test_a_kill_before_the_partitions_seal_is_sealed_by_the_next_run(tmp_path: Path) -> None:
    with opened(tmp_path, shard_bytes=3000) as store:
        for number in range(4):
            collect(store, number)
            store.commit()
        first = store.seal(4)
    PartitionLayout(tmp_path).summary.unlink()
    with opened(tmp_path) as store:
        assert store.seal(4) == first


@pytest.mark.parametrize("left", ["both names", "copy unnamed", "copy torn"])
def test_a_kill_during_recovery_is_recovered_from(tmp_path: Path, left: str) -> None:
    with opened(tmp_path) as store:
        collect(store, 0)
        store.commit()
    layout = PartitionLayout(tmp_path)
    open_part = part(layout.states(0))
    content = open_part.read_bytes()
    recovered = layout.states(0).with_name("states-000.arrow.recovered")
    if left == "both names":  # renamed, and killed before the old part was unlinked
        with opened(tmp_path):
            pass
        open_part.write_bytes(content)
    elif left == "copy unnamed":
        with opened(tmp_path):
            pass
        layout.states(0).rename(recovered)
        open_part.write_bytes(content)
    else:
        part(recovered).write_bytes(content[: len(content) // 2])
    finish(tmp_path, [0, 1])


def test_a_rejection_written_but_not_journaled_is_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        reject(store, 0)
        store.commit()
    rejected = PartitionLayout(tmp_path).rejected
    whole = rejected.read_bytes()
    for tail in (b"{", whole, whole[:-1], b"\xff\xff\n"):
        rejected.write_bytes(whole + tail)
        with opened(tmp_path) as store:
            assert store.counts().rejects == {"over_context": 1}
        assert rejected.read_bytes() == whole


def test_a_damaged_rejection_is_named_by_its_line(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        reject(store, 0)
        reject(store, 1, reason="stuck")
        store.commit()
    rejected = PartitionLayout(tmp_path).rejected
    good = rejected.read_bytes()
    for bad, what in (
        (good.replace(b'"stuck"', b'["ck"]  '), "line 2"),
        (good[:-1] + b" ", "line 2"),
        (good.replace(b"\n", b" "), "line 1"),
        (good.replace(prompt_id(0).encode(), prompt_id(9).encode()), prompt_id(9)),
        (good[:-5], "line 2"),
    ):
        rejected.write_bytes(bad)
        with pytest.raises(CorruptFile, match=what):
            open_store(tmp_path)
    rejected.unlink()
    with pytest.raises(CorruptFile):
        open_store(tmp_path)


def test_a_sealed_shard_that_lost_rows_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        collect(store, 0)
        store.commit()
    with opened(tmp_path):
        pass
    layout = PartitionLayout(tmp_path)
    other = tmp_path / "other"
    with opened(other) as store:
        for number in (0, 1):
            collect(store, number)
        store.seal(2)
    shutil.copy(PartitionLayout(other).states(0), layout.states(0))
    with pytest.raises(CorruptFile, match="2 rows, the journal promises 1"):
        open_store(tmp_path)


def test_another_fingerprint_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        reject(store, 0)
        store.commit()
    with pytest.raises(FingerprintMismatch):
        open_store(tmp_path, digest="cd" * 32)


def test_a_full_disk_is_said_once_and_for_all_and_costs_no_committed_row(small_disk: Path) -> None:
    root = small_disk / "00000"
    (small_disk / "filler").write_bytes(bytes(900_000))
    done: list[int] = []

    def fill(store: PartitionStore) -> None:
        for number in range(90):
            collect(store, number)
            store.commit()
            done.append(number)

    with opened(root) as store:
        with pytest.raises(StorageFull, match=r"(states|responses|journal).*free space") as first:
            fill(store)
        with pytest.raises(StorageFull) as second:
            store.commit()
        assert second.value is first.value
        with pytest.raises(StorageFull):
            collect(store, 95)
    assert len(done) > 5
    copy = small_disk.parent / "copy"
    shutil.copytree(root, copy)
    with opened(copy) as store:
        assert [n for n in range(90) if store.outcome(prompt_id(n), 0) is Outcome.COLLECTED][
            : len(done)
        ] == done
    finish(copy, list(range(90)))


def test_a_disk_too_full_to_recover_says_so_and_spoils_nothing(small_disk: Path) -> None:
    root = small_disk / "00000"
    with opened(root) as store:
        for number in range(20):
            collect(store, number)
        store.commit()
    before = {p.name: p.read_bytes() for p in root.iterdir()}
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(2 << 20))
    with pytest.raises(StorageFull):
        open_store(root)
    assert {n: (root / n).read_bytes() for n in before} == before
    filler.unlink()
    finish(root, list(range(20)))


def test_rows_do_not_stay_in_memory_after_a_commit(tmp_path: Path) -> None:
    wide = response(0, context_ids=np.ones(2000, np.int32), response_ids=np.ones(8000, np.int32))
    with opened(tmp_path) as store:
        tracemalloc.start()
        try:
            for number in range(6):
                answer = replace(wide, prompt_id=prompt_id(number))
                store.add_response(answer)
                store.add_states(answer.prompt_id, 0, ids_of(answer), 2000, states_like(10_000))
                store.commit()
                if number == 1:
                    after_two = tracemalloc.get_traced_memory()[0]
            grown = tracemalloc.get_traced_memory()[0] - after_two
        finally:
            tracemalloc.stop()
    assert part(PartitionLayout(tmp_path).states(0)).stat().st_size > 4 << 20
    assert grown < 100_000
