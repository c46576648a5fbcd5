"""Metrics of a run: metrics.jsonl always, TensorBoard's format where tensorboard is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from datagen.drafter.curves import read_metrics
from datagen.drafter.state import RunDirectory


class MetricsLog:
    """Two kinds of records: `train` and `heldout`."""

    def __init__(self, directory: RunDirectory, notify: Callable[[str], None]) -> None:
        self._directory = directory
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is None:
            notify(
                "tensorboard is not installed: metrics.jsonl alone (pip install 'datagen[train]')"
            )
        else:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory.root / "tensorboard"))

    def train(self, step: int, values: dict[str, Any]) -> None:
        """Loss, speed, gradient."""
        self._write("train", step, values)

    def heldout(self, step: int, values: dict[str, Any]) -> None:
        """Acceptance on the held-out slice."""
        self._write("heldout", step, values)

    def first_measured(self) -> dict[str, Any] | None:
        """Acceptance at step 0, as logged by the session that began the run."""
        if not self._directory.metrics.exists():
            return None
        for record in read_metrics(self._directory.metrics):
            if record["kind"] == "heldout" and record["step"] == 0:
                return {k: v for k, v in record.items() if k not in ("kind", "step", "time")}
        return None

    def close(self) -> None:
        """Flush."""
        if self._board is not None:
            self._board.close()

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._directory.log({"kind": kind, "step": step, "time": time.time(), **values})
        if self._board is None:
            return
        for name, value in values.items():
            if isinstance(value, list):
                for depth, v in enumerate(value, 1):
                    self._board.add_scalar(f"{kind}/{name}/{depth}", v, step)
            elif isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)
