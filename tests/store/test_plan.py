from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from datagen.errors import CorruptFile, StorageFull
from datagen.store.plan import FORMAT, SCHEMA, Plan, write_plan
from tests.store.rows import planned

ROWS = [
    planned(0, turns=3, tools='[{"type":"function"}]', thinking=False, category="code"),
    planned(1, language=None, messages='[{"content":"\\ud83d snow \N{SNOWMAN}","role":"user"}]'),
    planned(2, partition=1, split="heldout", licence=""),
]


def test_rows_come_back_in_order_by_partition(tmp_path: Path) -> None:
    path = tmp_path / "plan.arrow"
    digest = write_plan(path, iter(ROWS), {"mix": "made-up"})
    plan = Plan.open(path)
    assert [plan.partition(0), plan.partition(1)] == [ROWS[:2], ROWS[2:]]
    assert list(plan.rows()) == ROWS
    assert (plan.n_prompts, plan.n_samples, plan.n_partitions) == (3, 5, 2)
    assert [plan.split_of_partition(i) for i in (0, 1)] == ["train", "heldout"]
    assert plan.metadata == {"mix": "made-up"}
    assert plan.digest == digest == plan.recomputed_digest()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.arrow"]


def test_the_digest_sees_every_field_and_the_order(tmp_path: Path) -> None:
    path = tmp_path / "plan.arrow"
    other: dict[str, Any] = {
        "messages": "[]", "tools": "[]", "thinking": True, "n_turns": 2, "prompt_tokens": 13,
        "max_new_tokens": 65, "source": "b", "category": "c", "language": None, "licence": "MIT",
    }  # fmt: skip
    variants = [
        [planned(0), planned(1)],
        [planned(1), planned(0)],
        *([replace(planned(0), **{name: value}), planned(1)] for name, value in other.items()),
    ]
    digests = [write_plan(path, rows, {}) for rows in variants]
    assert len(set(digests)) == len(variants)
    assert write_plan(path, variants[0], {"note": "metadata is not content"}) == digests[0]


@pytest.mark.parametrize(
    "partitions", [[(1, "train")], [(0, "train"), (2, "train")], [(0, "train"), (0, "heldout")],
                   [(0, "train"), (1, "train"), (0, "train")]],
)  # fmt: skip
def test_partitions_out_of_order_or_across_splits_are_refused(
    tmp_path: Path, partitions: list[tuple[int, str]]
) -> None:
    rows = [planned(n, partition=p, split=s) for n, (p, s) in enumerate(partitions)]
    with pytest.raises(ValueError, match="cannot follow"):
        write_plan(tmp_path / "plan.arrow", rows, {})
    assert list(tmp_path.iterdir()) == []


def test_an_empty_plan_has_no_partition(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.arrow", [], {})
    plan = Plan.open(tmp_path / "plan.arrow")
    assert (plan.n_prompts, plan.n_samples, plan.n_partitions, list(plan.rows())) == (0, 0, 0, [])


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.arrow"
    write_plan(path, ROWS, {})
    raw = path.read_bytes()
    for length in range(0, len(raw), 7):
        path.write_bytes(raw[:length])
        with pytest.raises(CorruptFile):
            Plan.open(path)


@pytest.mark.parametrize("partition", [[0, 2**31 - 1], [0, 2], [1, 1], [0, -1], [1, 0], [-5, -4]])
def test_partition_numbers_that_make_no_sense_are_refused(
    tmp_path: Path, partition: list[int]
) -> None:
    path = tmp_path / "plan.arrow"
    write_plan(path, [planned(0), planned(1)], {})
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    at = table.schema.get_field_index("partition")
    forged = table.set_column(at, SCHEMA.field(at), pa.array(partition, type=pa.int32()))
    with pa.ipc.new_file(str(path), forged.schema) as writer:
        writer.write_table(forged)
    with pytest.raises(CorruptFile, match="in order"):
        Plan.open(path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.arrow"
    write_plan(path, ROWS, {})
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    other = table.replace_schema_metadata({"format": FORMAT[:-1] + "2"})
    with pa.ipc.new_file(str(path), other.schema) as writer:
        writer.write_table(other)
    with pytest.raises(CorruptFile, match=FORMAT):
        Plan.open(path)


def test_a_full_disk_leaves_no_plan(small_disk: Path) -> None:
    many = (planned(n, messages=f'"{"x" * 5000}"') for n in range(1000))
    with pytest.raises(StorageFull, match=r"plan\.arrow"):
        write_plan(small_disk / "plan.arrow", many, {})
    assert list(small_disk.iterdir()) == []


def test_writing_and_opening_hold_neither_the_rows_nor_the_file(tmp_path: Path) -> None:
    code = f"""
        import pathlib, resource, time
        from datagen.store.plan import Plan, write_plan
        from tests.store.rows import planned
        path = pathlib.Path({str(tmp_path / "plan.arrow")!r})
        one = planned(0, messages='"' + "x" * 20000 + '"')
        write_plan(path, [one], {{}})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_plan(path, (one for _ in range(25000)), {{}})
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown // 1024, path.stat().st_size // 2**20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    grown_mib, file_mib = map(int, done.stdout.split())
    assert file_mib > 450
    # Two batches of 80 MB and the pages of the mapped file that the kernel cares to keep: at most 1.51.
    assert grown_mib < file_mib * 1.9


@pytest.mark.slow
def test_a_plan_of_1_4_million_prompts_opens_in_two_seconds(tmp_path: Path) -> None:
    path = tmp_path / "plan.arrow"
    write_plan(path, (planned(n % 1000, partition=n // 512) for n in range(1_400_000)), {})
    started = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = Plan.open(path)
    assert len(plan.partition(2000)) == 512
    assert time.monotonic() - started < 2
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 100 << 10
