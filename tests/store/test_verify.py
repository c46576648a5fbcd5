"""Verify finds what is wrong: every damage here is done to real files of a complete run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from datagen.errors import VerifyFailed
from datagen.store.atomic import write_json_atomic
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import PartitionLayout, RunLayout, part
from datagen.store.manifest import build_manifest
from datagen.store.partition import PartitionStore
from datagen.store.plan import Plan, write_plan
from datagen.store.run_status import run_status
from datagen.store.states import ShardReader
from datagen.store.verify import VerifyReport, verify_run
from tests.store.rows import (
    collect_partition,
    complete_run,
    header,
    ids_of,
    open_store,
    prepare_run,
    response,
    states_of,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "run"
    complete_run(root, partitions=2, prompts=4)
    return root


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def faults(report: VerifyReport) -> str:
    return "\n".join(map(str, report.faults))


def test_a_sound_run_is_said_to_be_so_with_its_counts(good: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = verify_run(good, progress=lambda done, total: steps.append((done, total)))
    assert report.ok, faults(report)
    assert not report.partial
    assert steps == [(1, 2), (2, 2)]
    counts = report.counts
    assert (counts["planned"], counts["collected"]) == (10, 9)
    assert report.rejected == {"over_context": 1}
    assert counts["tokens"] > counts["supervised"] > 0
    table = dict(report.table_rows())
    assert table["run"] == "complete"
    assert table["samples rejected"] == "1 over_context"
    assert table["samples pending"] == "0"
    assert orjson.loads(orjson.dumps(report.as_dict()))["ok"] is True


def test_the_report_does_not_depend_on_how_many_work(tmp_path: Path) -> None:
    complete_run(tmp_path / "run", partitions=6, prompts=4)
    for index in (1, 4):
        shard = first(tmp_path / "run" / "partitions" / f"{index:05d}", "states-*.arrow")
        shard.write_bytes(shard.read_bytes()[:-1])
    steps: list[tuple[int, int]] = []
    alone = verify_run(tmp_path / "run", workers=1)
    together = verify_run(
        tmp_path / "run", workers=4, progress=lambda done, total: steps.append((done, total))
    )
    assert alone.as_dict() == together.as_dict()
    assert not alone.ok
    assert steps == [(n, 6) for n in range(1, 7)]


def test_a_quick_check_reads_no_states(good: Path) -> None:
    report = verify_run(good, quick=True)
    assert report.ok, faults(report)
    assert report.counts["tokens"] == 0
    assert dict(report.table_rows())["tokens with states"] == "not read (--quick)"


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_partial_run_is_sound_and_said_to_be_partial(tmp_path: Path, done: int) -> None:
    layout, plan = prepare_run(tmp_path / "run")
    if done:
        collect_partition(layout, plan, 0, seal=False, limit=done)
    report = verify_run(tmp_path / "run")
    assert report.ok, faults(report)
    assert report.partial
    assert report.counts["sealed"] == 0
    assert dict(report.table_rows())["run"] == "partial: no manifest yet"
    pending = int(dict(report.table_rows())["samples pending"])
    assert pending == report.counts["planned"] - report.counts["collected"]


def test_a_partial_run_whose_open_shard_is_damaged_is_not_sound(tmp_path: Path) -> None:
    layout, plan = prepare_run(tmp_path / "run")
    collect_partition(layout, plan, 0, seal=False, limit=2, shard_bytes=1 << 20)
    assert verify_run(layout.root).ok
    shard = part(layout.partition(0).states(0))
    assert shard.exists()
    shard.write_bytes(shard.read_bytes()[:300])
    assert "states-000.arrow.part" in faults(verify_run(tmp_path / "run"))


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VerifyFailed, match="no run is here"):
        verify_run(tmp_path)
    with pytest.raises(VerifyFailed, match="no run is here"):
        run_status(tmp_path)


# plan.arrow is checked by the digest of its content, not byte by byte: Arrow pads with bytes that
# mean nothing. JSON holds spaces.
EXACT = ["*-*.arrow", "journal.log", "rejected.jsonl", "partition.json", "fingerprint.json"]


def test_one_flipped_byte_in_any_file_is_found_and_its_file_named(run: Path) -> None:
    rng = random.Random(11)
    paths = [p for pattern in EXACT for p in sorted(run.rglob(pattern))]
    assert len(paths) > 10
    for path in paths:
        whole = path.read_bytes()
        for at in rng.sample(range(len(whole)), 6):
            bad = bytearray(whole)
            bad[at] ^= 0x04
            path.write_bytes(bad)
            report = verify_run(run)
            same_json = path.suffix == ".json" and _same_json(whole, bytes(bad))
            if not same_json and b"_at" not in _line_of(whole, at):
                assert not report.ok, f"{path}, byte {at}: nothing was found"
                named = {f.file for f in report.faults}
                # a wrong checksum in a seal cannot be told from a wrong file
                assert str(path.relative_to(run)) in named or path.suffix == ".json", named
        path.write_bytes(whole)
    assert verify_run(run).ok


def test_a_changed_word_in_the_plan_is_found(run: Path) -> None:
    path = run / "plan.arrow"
    path.write_bytes(path.read_bytes().replace(b"question 2", b"question 7"))
    assert "plan.arrow: its content has not the digest it states" in faults(verify_run(run))


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(orjson.loads(one) == orjson.loads(other))
    except orjson.JSONDecodeError:
        return False


def _line_of(content: bytes, at: int) -> bytes:
    return content[content.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]


def first(root: Path, pattern: str) -> Path:
    return sorted(root.rglob(pattern))[0]


def _swap_shards(root: Path) -> None:
    a, b = sorted(root.rglob("00000/states-*.arrow"))[:2]
    a.rename(a.with_suffix(".x"))
    b.rename(a)
    a.with_suffix(".x").rename(b)


def _edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        path = first(root, name)
        data = orjson.loads(path.read_bytes())
        change(data)
        write_json_atomic(path, data)

    return edit


def _truncate_journal(root: Path) -> None:
    journal = first(root, "journal.log")
    journal.write_bytes(journal.read_bytes()[:-64])


def _other_plan(root: Path) -> None:
    layout = RunLayout(root)
    rows = list(Plan.open(layout.plan).rows())
    write_plan(layout.plan, rows[:-1], {})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda r: first(r, "states-*.arrow").unlink(), "states-000.arrow: the file is gone"),
        (lambda r: first(r, "responses-*.arrow").unlink(), "responses-000.arrow: the file is gone"),
        (lambda r: first(r, "rejected.jsonl").unlink(), "rejected.jsonl: the file is gone"),
        (lambda r: first(r, "journal.log").unlink(), "journal.log: the file is gone"),
        (lambda r: first(r, "partition.json").unlink(), "partition.json: no partition seal"),
        (lambda r: shutil.rmtree(r / "partitions" / "00001"), "partitions/00001/partition.json"),
        (_swap_shards, "is not journaled in this shard"),
        (_truncate_journal, "its sha256 is not the recorded one"),
        (_other_plan, "plan.arrow: it is not the plan of the fingerprint"),
        (lambda r: (r / "partitions/00000/states-099.arrow").touch(), "states-099.arrow"),
        (lambda r: (r / "partitions/00000/states-099.arrow.part").touch(), "does not list"),
        (_edit_json("partition.json", lambda d: d.update(collected=3)), "collected: states 3"),
        (_edit_json("partition.json", lambda d: d.update(prompts=3)), "prompts: states 3, found 4"),
        (_edit_json("partition.json", lambda d: d.update(tokens_captured=1)), "tokens_captured"),
        (_edit_json("partition.json", lambda d: d.update(rejected={"x": 1})), "rejected: states"),
        (_edit_json("partition.json", lambda d: d["states"][0].update(rows=9)), "states 9 rows"),
        (_edit_json("partition.json", lambda d: d["states"][0].update(n_bytes=9)), "the seal states 9"),
        (_edit_json("partition.json", lambda d: d["states"].pop()), "a file that the seal does not"),
        (_edit_json("manifest.json", lambda d: d["token_frequencies"].update({"7": 999})),
         "manifest.json: token_frequencies.7: states 999"),
        (_edit_json("manifest.json", lambda d: d.update(raw_bytes=1)), "manifest.json: raw_bytes"),
        (_edit_json("manifest.json", lambda d: d["splits"]["heldout"].update(prompts_sha256="0" * 64)),
         "splits.heldout.prompts_sha256"),
        (_edit_json("manifest.json", lambda d: d["splits"]["train"]["states"].pop()), "train.states"),
        (_edit_json("manifest.json", lambda d: d["target"].update(model="other")), "target.model"),
        (_edit_json("manifest.json", lambda d: d["states"].update(boundaries=[1, 2, 3])),
         "states.boundaries"),
        (_edit_json("manifest.json", lambda d: d.update(fingerprint="0" * 64)), "fingerprint"),
        (_edit_json("fingerprint.json", lambda d: d["fields"].update(settings=1)), "digest"),
    ],
)  # fmt: skip
def test_damage_is_found_and_named(run: Path, damage: Callable[[Path], None], named: str) -> None:
    damage(run)
    report = verify_run(run)
    assert not report.ok
    assert named in faults(report)
    assert report.as_dict()["faults"]


Rows = NDArray[np.uint16]


def _with(layer: int, value: int) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        rows = rows.copy()
        rows[:, layer * 16 : layer * 16 + 16] = value
        return rows

    return change


def _one_nan(rows: Rows) -> Rows:
    rows = rows.copy()
    rows[2, 40] = 0x7FC1
    return rows


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_one_nan, "layer 2 holds NaN or infinity"),
        (_with(1, 0xFF80), "layer 1 holds NaN or infinity"),
        (_with(3, 0x8000), "layer 3 is all zero"),
        (_with(0, 0x3F80), "layer 0 is the same for every token"),
    ],
)
def test_states_no_model_gives_are_found_by_row_and_layer(
    tmp_path: Path, change: Callable[[Rows], Rows], named: str
) -> None:
    def add(store: PartitionStore) -> None:
        for turn in (0, 1):
            answer = response(0, turn)
            store.add_response(answer)
            rows = states_of(answer)
            store.add_states(
                answer.prompt_id, turn, ids_of(answer), len(answer.context_ids),
                change(rows) if turn else rows,
            )  # fmt: skip

    report = verify_run(one_prompt_run(tmp_path / "run", add))
    assert [str(f).partition(": ")[2] for f in report.faults] == [named]
    assert "states-000.arrow row 1" in faults(report)


def one_prompt_run(root: Path, add: Callable[[PartitionStore], None]) -> Path:
    """A complete run of one prompt of two turns, whose rows `add` writes."""
    layout, plan = prepare_run(root, partitions=1, prompts=1)
    digest = Fingerprint.load(layout.fingerprint).digest
    store = open_store(layout.partition(0).root, digest=digest)
    add(store)
    store.seal(1)
    store.close()
    build_manifest(layout, plan, header(layout))
    return root


def test_ids_and_masks_that_are_not_the_responses_are_found(tmp_path: Path) -> None:
    def add(store: PartitionStore) -> None:
        for turn, (shift, n_context) in enumerate(((1, None), (0, 1))):
            answer = response(0, turn)
            store.add_response(answer)
            store.add_states(
                answer.prompt_id, turn, ids_of(answer) + shift,
                n_context or len(answer.context_ids), states_of(answer),
            )  # fmt: skip

    found = faults(verify_run(one_prompt_run(tmp_path / "run", add)))
    assert "states-000.arrow row 0: its ids are not context + response" in found
    assert "states-000.arrow row 1: its mask is not 0 over the context" in found


def test_samples_without_outcome_or_without_states_are_found(tmp_path: Path) -> None:
    root = one_prompt_run(tmp_path / "run", lambda store: store.add_response(response(0)))
    found = faults(verify_run(root))
    assert "partition.json: sealed, but 2 samples have no outcome" in found
    assert "manifest.json: samples.pending: states 2, found 0" in found


def test_a_sample_that_was_not_planned_is_found(tmp_path: Path) -> None:
    def add(store: PartitionStore) -> None:
        for number, turn in ((0, 0), (0, 1), (9, 0)):
            answer = response(number, turn)
            store.add_response(answer)
            store.add_states(
                answer.prompt_id, turn, ids_of(answer), len(answer.context_ids), states_of(answer)
            )

    root = tmp_path / "run"
    layout, _ = prepare_run(root, partitions=1, prompts=1)
    store = open_store(layout.partition(0).root, digest=Fingerprint.load(layout.fingerprint).digest)
    add(store)
    store.seal(1)
    store.close()
    assert "is not planned" in faults(verify_run(root))


def test_status_counts_a_run_while_it_is_written(tmp_path: Path) -> None:
    layout, plan = prepare_run(tmp_path / "run")
    assert run_status(layout.root).pending == 10
    collect_partition(layout, plan, 0)
    digest = Fingerprint.load(layout.fingerprint).digest
    store = open_store(layout.partition(1).root, digest=digest)
    store.add_response(response(4))
    store.add_rejection(response(5).prompt_id, 0, "generate", "empty_output", "", 1)
    store.commit()
    with open(layout.partition(1).rejected, "ab") as f:
        f.write(b'{"half a li')  # on its way, not journaled yet
    status = run_status(layout.root)
    assert (status.planned, status.responded, status.collected) == (10, 5, 4)
    assert status.rejected == {"over_context": 1, "empty_output": 1}
    assert (status.pending, status.partitions_sealed, status.complete) == (4, 1, False)
    assert dict(status.table_rows())["rejected"] == "1 empty_output, 1 over_context"
    store.close()


def test_status_of_a_complete_run_agrees_with_verify(good: Path) -> None:
    status, report = run_status(good), verify_run(good)
    assert status.complete
    assert status.pending == 0
    assert status.collected == report.counts["collected"]
    assert status.rejected == dict(report.rejected)
    shards = PartitionLayout(good / "partitions" / "00000").numbers("states")
    assert all(
        len(ShardReader(good / "partitions" / "00000" / f"states-{n:03d}.arrow")) for n in shards
    )
