"""Kill the writer at every system call it makes, and at random instants; nothing is lost or doubled."""

from __future__ import annotations

import random
import shutil
import struct
import time
from collections import Counter
from pathlib import Path

import pytest

from datagen.store.journal import Kind, read_journal
from datagen.store.layout import PartitionLayout
from datagen.store.partition import PartitionSummary
from datagen.store.rejections import read_rejections
from datagen.store.responses import ResponsesReader
from datagen.store.states import ShardReader
from tests.forks import FORKS
from tests.store.faults import COUNT, REJECTED, write_rows
from tests.store.rows import DIGEST, prompt_id


def run(
    root: Path, at: int, *, power_cut: bool = False, kill_after_s: float | None = None
) -> tuple[bool, set[int]]:
    """One writer; returns whether it ended by itself, and the samples it acknowledged."""
    ours, theirs = FORKS.Pipe(duplex=False)
    writer = FORKS.Process(target=write_rows, args=(root, at, power_cut, theirs))
    writer.start()
    theirs.close()
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        writer.kill()
    acknowledged: set[int] = set()
    try:
        while True:
            acknowledged.add(struct.unpack("<I", ours.recv_bytes())[0])
    except (EOFError, OSError):  # a message cut by the kill was not received
        ours.close()
    writer.join()
    code = writer.exitcode
    writer.close()
    assert code in (0, -9), f"the writer failed with exit code {code}"
    return code == 0, acknowledged


def journaled(root: Path) -> set[int]:
    """Samples with a final outcome, by the journal."""
    numbers = {prompt_id(n): n for n in range(COUNT)}
    records = read_journal(PartitionLayout(root / "partitions" / "00000").journal, DIGEST)
    final = records[(records["kind"] == Kind.STATES) | (records["kind"] == Kind.REJECTED)]
    return {numbers[bytes(r["prompt_id"]).hex()] for r in final}


def require_every_row_once(root: Path) -> None:
    layout = PartitionLayout(root / "partitions" / "00000")
    PartitionSummary.load(layout.summary)
    collected = Counter(f"{prompt_id(n)}-0" for n in range(COUNT) if n not in REJECTED)
    said: Counter[str] = Counter()
    for number in layout.numbers("responses"):
        said.update(r.sample_id for r in ResponsesReader(layout.responses(number)))
    seen: Counter[str] = Counter()
    for number in layout.numbers("states"):
        shard = ShardReader(layout.states(number))
        for row in range(len(shard)):
            assert len(shard.states(row)) == shard.columns(row).n_tokens
            seen[shard.columns(row).sample_id] += 1
    rejections = [r.sample_id for r in read_rejections(layout.rejected, len(REJECTED))]
    assert said == collected
    assert seen == collected
    assert sorted(rejections) == sorted(f"{prompt_id(n)}-0" for n in REJECTED)
    assert not list(layout.root.glob("*.part"))


def fresh(root: Path) -> None:
    for path in (root, root.with_name(root.name + ".shadow")):
        shutil.rmtree(path, ignore_errors=True)
    root.mkdir()


@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize(
    "stride", [8, pytest.param(1, marks=pytest.mark.slow)], ids=["every eighth", "every"]
)
def test_a_death_at_a_system_call_loses_and_doubles_nothing(
    tmp_path: Path, stride: int, power_cut: bool
) -> None:
    root, rng = tmp_path / "run", random.Random(3)
    at, finished = 0, False
    while not finished:
        at += rng.randint(1, 2 * stride - 1)
        fresh(root)
        finished, acknowledged = run(root, at, power_cut=power_cut)
        assert acknowledged <= journaled(root), f"lost after a death at call {at}"
        if not finished:
            # And a second death, somewhere in the recovery from the first.
            _, more = run(root, rng.randrange(1, 25), power_cut=power_cut)
            assert acknowledged | more <= journaled(root), f"lost after a second death, {at}"
            done, _ = run(root, 0)
            assert done
        require_every_row_once(root)
    assert at > 60


@pytest.mark.parametrize("kills", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_writer_killed_at_random_again_and_again_still_ends_with_every_row(
    tmp_path: Path, kills: int
) -> None:
    root, rng = tmp_path / "run", random.Random(kills)
    killed = 0
    while killed < kills:
        fresh(root)
        acknowledged: set[int] = set()
        finished = False
        while not finished and killed < kills:
            finished, more = run(root, 0, kill_after_s=rng.uniform(0.005, 0.06))
            killed += not finished
            acknowledged |= more
            assert acknowledged <= journaled(root)
        if not finished:
            assert run(root, 0)[0]
        require_every_row_once(root)
