"""A training run on disk: checkpoints that are whole or absent, and the log of its metrics.

<out>/checkpoints/step-000200/   config.json, model.safetensors (loadable by SGLang), provenance.json,
                                 trainer.state (safetensors, float32: master.*, average.* with
                                 ema, exp_avg.*, exp_avg_sq.*, step.* of what is AdamW's,
                                 momentum_buffer.* of what is Muon's)
<out>/final/                     the same without trainer.state
<out>/metrics.jsonl              one JSON object per logged or measured step
<out>/tensorboard/               the same, where tensorboard is installed
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from datagen.drafter.checkpoint import write_directory
from datagen.drafter.curves import read_metrics
from datagen.drafter.settings import TrainConfig
from datagen.errors import ConfigError, CorruptFile, FingerprintMismatch
from datagen.store.atomic import write_atomic, write_json_atomic

STATE, PROVENANCE = "trainer.state", "provenance.json"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a training run lies."""

    root: Path

    @property
    def final(self) -> Path:
        """The finished drafter."""
        return self.root / "final"

    @property
    def metrics(self) -> Path:
        """The log."""
        return self.root / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        """The log as a picture."""
        return self.root / "curves.svg"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, directory) of every whole checkpoint, oldest first."""
        found = []
        for path in (self.root / "checkpoints").glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdigit() and (path / PROVENANCE).exists():
                found.append((int(number), path))
        return sorted(found)

    def save(
        self, step: int, tensors: dict[str, Tensor], provenance: dict[str, Any],
        export: Callable[[Path], None], *, keep: int,
    ) -> Path:  # fmt: skip
        """Write a checkpoint, then drop those older than the last `keep`."""

        def fill(work: Path) -> None:
            export(work)
            plain = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
            save_file(plain, str(work / STATE))
            write_json_atomic(work / PROVENANCE, provenance)

        path = self.root / "checkpoints" / f"step-{step:06d}"
        write_directory(path, fill)
        for _, old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)
        return path

    def latest(self, settings: dict[str, Any]) -> tuple[int, dict[str, Tensor]] | None:
        """Step and tensors of the newest checkpoint, or None where there is none.

        Raises FingerprintMismatch naming the settings that differ, CorruptFile.
        """
        found = self.checkpoints()
        if not found:
            return None
        step, path = found[-1]
        require_same_settings(read_provenance(path)["settings"], settings, path)
        try:
            return step, load_file(str(path / STATE))
        except (OSError, SafetensorError) as e:
            raise CorruptFile(
                f"no trainer state can be read: {e}", where=path / STATE, fix="delete the directory"
            ) from e

    def truncate_metrics(self, step: int) -> None:
        """Drop what was logged after `step`: it is about to happen again."""
        if self.metrics.exists():
            kept = [r for r in read_metrics(self.metrics) if r["step"] <= step]
            write_atomic(self.metrics, "".join(json.dumps(r) + "\n" for r in kept).encode())

    def log(self, record: dict[str, Any]) -> None:
        """Append a record; a kill may tear the last line, which is cut at the next start."""
        with open(self.metrics, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")


def read_provenance(directory: Path) -> dict[str, Any]:
    """provenance.json of a checkpoint."""
    path = directory / PROVENANCE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["settings"]
    except (OSError, ValueError, KeyError) as e:
        raise CorruptFile(f"no provenance: {e!r}", where=path) from e
    return found


def require_same_settings(stored: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    """Raise FingerprintMismatch naming every setting that differs.

    A training setting that is not stored came later: the checkpoint was made as its default makes it.
    """
    stored = {**TrainConfig().model_dump(mode="json"), **stored}
    names = sorted(set(stored) | set(now))
    changed = [
        f"{n} is {now.get(n)}, was {stored.get(n)}" for n in names if stored.get(n) != now.get(n)
    ]
    if changed:
        raise FingerprintMismatch(
            f"the checkpoints were made under other settings: {'; '.join(changed)}", where=where,
            fix="use those settings, or another output directory",
        )  # fmt: skip


def require_empty_of_others(root: Path) -> None:
    """Raise ConfigError when the directory holds something that is no training run."""
    known = {"checkpoints", "final", "metrics.jsonl", "tensorboard", "curves.svg", ".lock"}
    if root.exists():
        foreign = [
            p.name for p in root.iterdir()
            if p.name not in known and not p.name.endswith(".tmp")
        ]  # fmt: skip
        if foreign:
            raise ConfigError(
                f"the output directory holds {foreign[0]}, which is not a training run's",
                where=root, fix="name another --out",
            )  # fmt: skip
