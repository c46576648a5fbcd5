"""Loss and gradients of a micro-batch: launched kernel by kernel, or recorded once and replayed.

A small drafter (SmolLM2's has ten million weights) has more than a thousand kernels a step, each shorter
than its launch: the GPU waits for Python. Recorded as a CUDA graph, a step is one launch. A graph has
fixed addresses and shapes: batches are padded to few shapes, each recorded when it first comes, and
which pairs train is a factor in their weight and no selection.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from datagen.drafter.attention import BLOCK
from datagen.drafter.model import Drafter
from datagen.drafter.ranks import Ranks
from datagen.drafter.rows import Batch
from datagen.drafter.settings import RunConfig
from datagen.drafter.step import StepLoss, Sums

RECORDED_WEIGHTS = 1 << 27
"""Above it, kernels are longer than launches and padding costs more than it saves."""
WARM_UPS = 2  # compilation, and what is allocated on first use, may not be recorded


class Gradients(Protocol):
    """Adds the gradients of a micro-batch to the weights' `.grad`."""

    def __call__(self, batch: Batch, weight_K: Tensor, *, last: bool) -> tuple[Tensor, Sums]:
        """(loss, Sums) of a batch as the loader gives it. `last`: of the optimizer step."""
        ...


class Eager:
    """Kernel by kernel; with several ranks, gradients are exchanged after the last micro-batch."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, ranks: Ranks) -> None:
        self._module, self._dtype, self._ranks = module, dtype, ranks

    def __call__(self, batch: Batch, weight_K: Tensor, *, last: bool) -> tuple[Tensor, Sums]:
        batch = batch.to(self._ranks.device, self._dtype)
        if last:
            total, sums = self._module(batch, weight_K)
            total.backward()
        else:
            with self._ranks.unsynced(self._module):
                total, sums = self._module(batch, weight_K)
                total.backward()
        return total.detach(), sums


class Recorded:
    """One graph per shape of batch. `keeps`: gradients are added up over micro-batches."""

    def __init__(self, module: StepLoss, dtype: torch.dtype, *, keeps: bool) -> None:
        self._module, self._dtype, self._keeps = module, dtype, keeps
        self._weights = [p for p in module.drafter.parameters() if p.requires_grad]
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, weight_K: Tensor, *, last: bool) -> tuple[Tensor, Sums]:  # noqa: ARG002
        shape = len(batch.tokens_M), len(batch.active_A), batch.final_AH is not None
        if shape not in self._graphs:
            on_device = batch.to(weight_K.device, self._dtype)
            self._graphs[shape] = _Graph(
                self._module, self._weights, on_device, weight_K, self._pool
            )
        total, sums, grads = self._graphs[shape].replay(batch, weight_K)
        for weight, grad in zip(self._weights, grads, strict=True):
            if weight.grad is not None:
                weight.grad.add_(grad)
            else:  # the graph's own memory, unless its next replay comes before the optimizer
                weight.grad = grad.clone() if self._keeps else grad
        return total, sums


class _Graph:
    """A recorded forward and backward; inputs and results stay at their addresses."""

    def __init__(
        self, module: StepLoss, weights: list[nn.Parameter], batch: Batch, weight_K: Tensor,
        pool: Any,
    ) -> None:  # fmt: skip
        self._batch, self._weight_K = batch, weight_K.clone()

        def once() -> tuple[Tensor, Sums, tuple[Tensor, ...]]:
            # What a batch says of its samples on the host is this batch's alone: no kernel may use it.
            anonymous = replace(self._batch, sample_ids=(), rows=(), active=())
            total, sums = module(anonymous, self._weight_K)
            return total.detach(), sums, torch.autograd.grad(total, weights)

        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                once()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # The loader's threads allocate pinned memory meanwhile, which would end a "global" capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._total, self._sums, self._grads = once()

    def replay(self, batch: Batch, weight_K: Tensor) -> tuple[Tensor, Sums, tuple[Tensor, ...]]:
        """Results of another batch of the shape. The gradients are valid until the next replay."""
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                getattr(self._batch, field.name).copy_(value, non_blocking=True)
        self._weight_K.copy_(weight_K)
        self._graph.replay()
        sums = Sums(self._sums.table_3K.clone(), self._sums.bad_A.clone())
        return self._total.clone(), sums, self._grads


def may_be_recorded(drafter: Drafter, how: RunConfig, ranks: Ranks) -> bool:
    """One CUDA device, fused attention, and a drafter small enough to wait for its launches."""
    size = sum(p.numel() for p in drafter.parameters())
    return (
        how.graphs and how.compile and not how.recompute and how.attention != "eager"
        and ranks.device.type == "cuda" and ranks.count == 1 and size <= RECORDED_WEIGHTS
    )  # fmt: skip


def recorded_shapes(batch_tokens: int) -> tuple[int, int]:
    """(rows of every batch, what its query rows are a multiple of): at most four shapes."""
    blocks = -(-batch_tokens // BLOCK)
    return blocks * BLOCK, -(-blocks // 4) * BLOCK
