"""Whole runs whose captures are encoded by processes: the rows of one with threads, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datagen.collect.encode_processes import BLOCKS, EncodeProcesses
from datagen.collect.job import CollectJob
from datagen.config import CollectConfig, collect_config
from datagen.store.codecs import Encoded
from datagen.store.partition import PartitionStore
from datagen.store.run_reader import RunReader
from datagen.store.verify import verify_run
from tests.collect.harness import Bench
from tests.tiny import free_port


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("encode-processes")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.scripted_target", str(port), str(folder / "spool"), "some"],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"serving\n"
        yield Bench.make(folder, f"http://127.0.0.1:{port}", prompts=40)
        server.terminate()
        server.wait(10)


def stored(root: Path) -> dict[str, bytes]:
    """The states of every sample of a run, by its id."""
    run = RunReader.open(root / "manifest.json")
    return {run.columns(n).sample_id: run.states(n).tobytes() for n in range(len(run))}


async def test_a_run_whose_processes_are_killed_holds_the_rows_of_one_with_threads(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "cache"))

    def config(run: str, encode_processes: int) -> CollectConfig:
        return collect_config(
            run=str(bench.folder / run), mix=str(bench.mix), target=str(bench.profile),
            tokenizer=str(bench.checkpoint), partition_prompts=5, accept_risk="boundaries",
            encode_processes=encode_processes,
        ).model_copy(update={"max_fault_rate": 1.0})  # fmt: skip

    async with CollectJob.open(config("threads", 0), print) as job:
        plain = await job.collect_all()
    killed: set[int] = set()
    async with CollectJob.open(config("killed", 2), print) as job:
        assert job._shop is not None
        encoders = job._shop.encoders
        assert isinstance(encoders, EncodeProcesses)

        async def kill() -> None:
            while len(killed) < 3:
                before = job.progress.collected
                while job.progress.collected < before + 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                pid = min(set(encoders.pids) - killed)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            group.create_task(kill())
            manifest = await job.collect_all()
    assert len(killed) == 3
    assert manifest.samples == plain.samples
    assert manifest.samples.rejected
    assert verify_run(bench.folder / "killed").ok
    assert stored(bench.folder / "killed") == stored(bench.folder / "threads")
    assert not list((bench.folder / "spool").glob("*.safetensors"))


async def test_what_is_written_is_free_for_another_sample_while_it_is_synced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "cache"))
    config = collect_config(
        run=str(bench.folder / "freed"), mix=str(bench.mix), target=str(bench.profile),
        tokenizer=str(bench.checkpoint), accept_risk="boundaries", encode_processes=1,
    ).model_copy(update={"max_fault_rate": 1.0})  # fmt: skip
    most = encoded = 0
    commit = PartitionStore.commit
    async with CollectJob.open(config, print) as job:
        assert job._shop is not None
        encoders = job._shop.encoders
        assert isinstance(encoders, EncodeProcesses)

        def slow(store: PartitionStore) -> None:
            nonlocal most
            time.sleep(0.1)
            most = max(most, encoded - job.progress.collected)
            commit(store)

        def lend(*args: Any) -> Encoded:
            nonlocal encoded
            encoded += 1
            return lent(*args)

        lent = encoders._lend
        monkeypatch.setattr(encoders, "_lend", lend)
        monkeypatch.setattr(PartitionStore, "commit", slow)
        async with asyncio.timeout(100):
            manifest = await job.collect_all()
    assert manifest.samples.collected > 20
    assert most > BLOCKS
