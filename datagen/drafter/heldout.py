"""Measuring a drafter on the held-out slice while it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from datagen.drafter.dataset import FinalNorm
from datagen.drafter.loader import Loader
from datagen.drafter.logs import MetricsLog
from datagen.drafter.metrics import Acceptance, measure
from datagen.drafter.model import Drafter
from datagen.drafter.optimise import Average, averaged
from datagen.drafter.packing import filled
from datagen.drafter.target import Target


@dataclass(slots=True, kw_only=True)
class HeldOut:
    """Acceptance of the (averaged) drafter; `measured` is by step. Every rank measures all of the

    slice, so that none waits for another.
    """

    drafter: Drafter
    average: Average | None
    target: Target
    loader: Loader
    batch_tokens: int
    depths: int
    attention: str
    final_norm: FinalNorm
    device: torch.device
    dtype: torch.dtype
    total_steps: int
    notify: Callable[[str], None]
    measured: dict[int, dict[str, Any]] = field(default_factory=dict)

    def at(self, step: int, log: MetricsLog | None) -> Acceptance:
        """Measure, log, and say so."""
        data = self.loader.data
        groups = filled(range(len(data.refs)), data.lengths, self.batch_tokens)
        batches = (b.to(self.device, self.dtype) for b in self.loader.stream(groups))
        with averaged(self.drafter, self.average):
            result = measure(
                self.drafter, self.target, batches, depths=self.depths, attention=self.attention,
                final_norm=None if self.final_norm == "none" else self.final_norm,
            )  # fmt: skip
        self.measured[step] = result.as_dict()
        if log is not None:
            log.heldout(step, self.measured[step])
        chain = " ".join(f"{a:.3f}" for a in result.conditional)
        self.notify(
            f"step {step} of {self.total_steps}: held-out predicted_accept_len "
            f"{result.predicted_accept_len:.3f}, conditional acceptance {chain}"
        )
        return result
