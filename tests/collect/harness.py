"""Runs the real command line against a real server, and reads back what the disk holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datagen.collect.job import CollectJob
from datagen.config import collect_config
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.plan import Plan
from datagen.store.responses import ResponsesReader
from datagen.store.states import ShardReader
from tests.tiny import write_tiny_checkpoint, write_tiny_mix, write_tiny_profile

CLI = [sys.executable, "-m", "datagen.cli"]


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder with a tiny checkpoint, a profile that points at `url`, and a mix."""

    folder: Path
    checkpoint: Path
    profile: Path
    mix: Path

    @classmethod
    def make(cls, folder: Path, url: str, *, prompts: int, **profile: object) -> Bench:
        checkpoint = folder / "tiny-llama"
        if not checkpoint.exists():
            write_tiny_checkpoint(checkpoint)
        return cls(
            folder,
            checkpoint,
            write_tiny_profile(folder / "tiny-profile.yaml", checkpoint, url, **profile),
            write_tiny_mix(folder, prompts),
        )

    def command(self, run: str, *more: str) -> list[str]:
        return [
            *CLI, "collect", "--run", str(self.folder / run), "--mix", str(self.mix),
            "--target", str(self.profile), "--tokenizer", str(self.checkpoint),
            "--partition-prompts", "5", *more,
        ]  # fmt: skip

    def collect(
        self, run: str, *more: str, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(run, *more), capture_output=True, text=True, timeout=timeout,
            env=environment(self.folder), check=False,
        )  # fmt: skip

    def start(self, run: str, *more: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{run}.log", "ab") as log:
            return subprocess.Popen(
                self.command(run, *more), stdout=subprocess.DEVNULL, stderr=log,
                env=environment(self.folder), start_new_session=True,
            )  # fmt: skip

    async def collect_here(self, run: str, **settings: Any) -> Manifest:
        """The same job in this process: no interpreter to start, one import of transformers."""
        given = {
            "run": str(self.folder / run), "mix": str(self.mix), "target": str(self.profile),
            "tokenizer": str(self.checkpoint), "partition_prompts": 5,
            "accept_risk": "boundaries",  # the scripted target draws its states
        }  # fmt: skip
        async with CollectJob.open(collect_config(**(given | settings)), print) as job:
            return await job.collect_all()

    def verify(self, run: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, "verify", str(self.folder / run)], capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """Ours, with the caches in the test's folder and no wide tables cut."""
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "400"}


def responses(root: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(sample_id, response ids) of every stored response."""
    layout = RunLayout(root)
    for index in range(Plan.open(layout.plan).n_partitions):
        partition = layout.partition(index)
        for number in partition.numbers("responses"):
            for response in ResponsesReader(partition.responses(number)):
                yield response.sample_id, tuple(response.response_ids.tolist())


def state_ids(root: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(sample_id, input ids) of every sample with states."""
    layout = RunLayout(root)
    for index in range(Plan.open(layout.plan).n_partitions):
        partition = layout.partition(index)
        for number in partition.numbers("states"):
            shard = ShardReader(partition.states(number))
            for row in range(len(shard)):
                columns = shard.columns(row)
                yield columns.sample_id, tuple(columns.input_ids.tolist())


def rows_done(root: Path) -> int:
    """Samples with states so far, by the journals; 0 before the plan is frozen."""
    from datagen.store.run_status import run_status

    return run_status(root).collected if (root / "plan.arrow").exists() else 0
