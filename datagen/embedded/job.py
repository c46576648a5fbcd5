"""One request on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from datagen.embedded.cache import SequenceCache
from datagen.embedded.requests import Request
from datagen.embedded.speculate import DraftState

PIECE_TOKENS = 512  # per step: larger packs gain nothing on a CPU and stall running requests


@dataclass(slots=True, eq=False)
class Job:
    request: Request
    done: Callable[[Request], None]
    cache: SequenceCache | None = None
    n_read: int = 0  # prompt tokens prefilled so far
    rows: list[torch.Tensor] = field(default_factory=list)  # captured so far, a piece each
    draft: DraftState | None = None

    @property
    def n_next(self) -> int:
        """Size of the next piece of the prompt."""
        return min(len(self.request.input_ids) - self.n_read, PIECE_TOKENS)

    @property
    def most_tokens(self) -> int:
        """Context and response at their longest."""
        return len(self.request.input_ids) + self.request.params.max_new_tokens
