"""What is exported: the collected samples of a manifest, in order, into a directory that appears whole."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile, ExportRefused
from datagen.store.atomic import fsync_dir
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.plan import Plan, PlannedPrompt
from datagen.store.responses import Response, ResponsesReader
from datagen.store.states import SampleColumns, ShardReader

FORMATS = ("speculators", "specforge", "huggingface")


@dataclass(frozen=True, slots=True)
class Source:
    """A finished run: its manifest and its plan, both checked when opened."""

    root: Path
    manifest: Manifest
    plan: Plan

    @classmethod
    def open(cls, manifest: Path) -> Source:
        """From a manifest.json, or the run's directory. Raises CorruptFile, ExportRefused."""
        path = manifest / "manifest.json" if manifest.is_dir() else manifest
        loaded = Manifest.load(path)
        loaded.require_files(path.parent)
        plan = Plan.open(RunLayout(path.parent).plan)
        if plan.digest != loaded.plan_digest:
            raise CorruptFile("the plan is not the manifest's", where=path.parent, fix="restore it")
        return cls(path.parent, loaded, plan)

    def splits(self, wanted: str) -> list[str]:
        """The splits to export, of those that hold samples. Raises ExportRefused."""
        names = [s for s, entry in self.manifest.splits.items() if entry.states]
        chosen = names if wanted == "all" else [n for n in names if n == wanted]
        if not chosen:
            raise ExportRefused(
                f"split '{wanted}' holds no sample",
                where=self.root,
                fix=f"choose one of {', '.join([*names, 'all'])}",
            )
        return chosen

    def shards(self, split: str) -> Iterator[ShardReader]:
        """The shards of a split, in order."""
        for entry in self.manifest.splits[split].states:
            yield ShardReader(self.root / entry.path)

    def samples(self, split: str) -> Iterator[tuple[SampleColumns, ShardReader, int]]:
        """Columns, shard and row of every sample; the states are read by who needs them."""
        for shard in self.shards(split):
            for row in range(len(shard)):
                yield shard.columns(row), shard, row

    def with_responses(
        self, split: str
    ) -> Iterator[tuple[PlannedPrompt, Response, SampleColumns, ShardReader, int]]:
        """The same with prompt and response, a partition at a time. Raises CorruptFile."""
        entry = self.manifest.splits[split]
        for index in sorted({f.partition for f in entry.states}):
            prompts = {p.prompt_id: p for p in self.plan.partition(index)}
            answers = {
                answer.sample_id: answer
                for file in entry.responses
                if file.partition == index
                for answer in ResponsesReader(self.root / file.path)
            }
            for file in entry.states:
                if file.partition != index:
                    continue
                shard = ShardReader(self.root / file.path)
                for row in range(len(shard)):
                    columns = shard.columns(row)
                    try:
                        prompt, answer = prompts[columns.prompt_id], answers[columns.sample_id]
                    except KeyError as e:
                        raise CorruptFile(
                            f"row {row}: no prompt or response for {e}",
                            where=self.root / file.path,
                            fix="run `datagen verify`",
                        ) from e
                    yield prompt, answer, columns, shard, row


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `output` when all went well, and else goes.

    Raises ExportRefused when `output` is there already and holds something.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportRefused(
            "the output is there already", where=output, fix="name a new or empty directory"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed export left
    unfinished.mkdir()
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if output.exists():
        output.rmdir()
    unfinished.rename(output)
    fsync_dir(output.parent)


def supervised_frequencies(columns: SampleColumns) -> NDArray[np.int64]:
    """Occurrences by token id over the supervised tokens."""
    return np.bincount(columns.input_ids[columns.loss_mask == 1])
