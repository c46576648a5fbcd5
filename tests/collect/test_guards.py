"""States with NaN from a server: asked for again, then quarantined, and too many stop the run."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from datagen.errors import StatesFaulty
from datagen.store.layout import RunLayout
from datagen.store.rejections import read_rejections
from datagen.store.run_status import run_status
from datagen.store.states import ShardReader
from datagen.store.verify import verify_run
from tests.collect.harness import CLI, Bench, state_ids
from tests.scripted_target import scripted


def not_finite(root: Path) -> list[str]:
    """Stored samples that hold NaN."""
    found: list[str] = []
    for path in root.rglob("states-*.arrow"):
        shard = ShardReader(path)
        found += [
            shard.columns(row).sample_id
            for row in range(len(shard))
            if ((shard.states(row) & 0x7F80) == 0x7F80).any()
        ]
    return found


async def test_a_bad_capture_is_asked_for_again_and_nothing_is_lost(tmp_path: Path) -> None:
    async with scripted(tmp_path / "spool", "first") as url:
        manifest = await Bench.make(tmp_path, url, prompts=3).collect_here("again")
    assert manifest.samples.collected == manifest.samples.planned
    assert not not_finite(tmp_path / "again")
    assert not list((tmp_path / "spool").iterdir()), "refused captures leave the spool"


async def test_samples_that_stay_bad_are_quarantined_with_their_reason(tmp_path: Path) -> None:
    async with scripted(tmp_path / "spool", "some") as url:
        manifest = await Bench.make(tmp_path, url, prompts=16).collect_here("some")
    root, samples = tmp_path / "some", manifest.samples
    assert 0 < samples.rejected["states_not_finite"] < samples.planned // 2
    assert samples.collected + samples.rejected["states_not_finite"] == samples.planned
    assert not not_finite(root)
    report = verify_run(root)
    assert report.ok, report.faults
    entries = [
        entry
        for path in root.rglob("rejected.jsonl")
        for entry in read_rejections(path, len(path.read_text().splitlines()))
    ]
    assert {(e.stage, e.reason, e.attempts) for e in entries} == {
        ("capture", "states_not_finite", 3)
    }
    assert "boundary 3 holds NaN or infinity in 1 of" in entries[0].detail


async def test_an_engine_that_gives_nothing_else_stops_the_run_with_the_cause(
    tmp_path: Path,
) -> None:
    async with scripted(tmp_path / "spool", "all") as url:
        bench = Bench.make(tmp_path, url, prompts=40)
        with pytest.raises(StatesFaulty) as error:
            await bench.collect_here("all")
    for part in ("captures were refused", "states_not_finite", url, "bfloat16"):
        assert part in str(error.value)
    status = run_status(tmp_path / "all")
    assert status.collected == 0
    assert status.pending > status.planned // 2, "the run stopped before the rows were spent"
    assert not RunLayout(tmp_path / "all").manifest.exists()
    async with scripted(tmp_path / "spool") as url:
        await bench.collect_here("all", endpoints=url)
    assert run_status(tmp_path / "all").pending == 0


async def test_retry_asks_for_exactly_the_rejected_samples_again(tmp_path: Path) -> None:
    root = tmp_path / "some"
    async with scripted(tmp_path / "spool", "some") as url:
        bench = Bench.make(tmp_path, url, prompts=16)
        before = await bench.collect_here("some")
    stored = dict(state_ids(root))
    bytes_before = {p: p.read_bytes() for p in root.rglob("*-*.arrow")}
    done = await asyncio.to_thread(
        subprocess.run,
        [*CLI, "retry", str(root), "--rejected", "states_not_finite"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    count = before.samples.rejected["states_not_finite"]
    assert f"{count} samples rejected with states_not_finite are pending again" in done.stdout
    async with scripted(tmp_path / "spool") as url:
        after = await bench.collect_here("some", endpoints=url)
    assert after.samples.collected == after.samples.planned
    assert len(dict(state_ids(root))) == len(stored) + count
    for path, content in bytes_before.items():
        assert path.read_bytes() == content, "what was collected is left as it was"
    report = verify_run(root)
    assert report.ok, report.faults
