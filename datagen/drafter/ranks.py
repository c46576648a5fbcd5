"""One process or many. Many are started by `accelerate launch`, which tells each its rank.

Weights are replicated (DDP): a drafter of Kimi's size, its moments and the target's head fit one GPU.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from datagen.errors import ConfigError


class Ranks:
    """This process alone."""

    rank = 0
    count = 1

    def __init__(self, device: str) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
            torch.zeros(1, device=self.device)
            if self.device.type == "cuda" and self.device.index is not None:
                # A CUDA graph is recorded on the current device, whatever device its tensors are on.
                torch.cuda.set_device(self.device)
        except (RuntimeError, AssertionError) as e:
            raise ConfigError(f"device '{device}' cannot be used: {e}", fix="use cpu") from e

    def wrapped(self, module: nn.Module) -> nn.Module:
        """The module whose forward and backward keep the ranks' gradients together."""
        return module

    def unsynced(self, module: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Within: gradients stay local, for all but the last micro-batch of a step."""
        return contextlib.nullcontext()

    def summed(self, value: Tensor) -> Tensor:
        """Over all ranks."""
        return value

    def wait(self) -> None:
        """For the others."""


class Accelerated(Ranks):
    """One rank of several."""

    def __init__(self, device: str) -> None:
        try:
            from accelerate import Accelerator, DistributedDataParallelKwargs
        except ImportError as e:
            raise ConfigError(
                "several processes need accelerate", fix="pip install 'datagen[train]'"
            ) from e
        # Explicit precision: ours is by the features' dtype, whatever the launcher was told.
        # The vocabulary maps are the same everywhere; gradients live in the buckets that are sent.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        self._accelerator = Accelerator(
            mixed_precision="no", cpu=device == "cpu", kwargs_handlers=[ddp]
        )
        kind = str(self._accelerator.distributed_type.value)
        if kind not in ("MULTI_GPU", "MULTI_CPU"):
            raise ConfigError(
                f"distributed type {kind} is not supported",
                fix="launch with --multi_gpu (DDP): the drafter fits one GPU",
            )
        self.device = self._accelerator.device
        self.rank = self._accelerator.process_index
        self.count = self._accelerator.num_processes

    def wrapped(self, module: nn.Module) -> nn.Module:
        out: nn.Module = self._accelerator.prepare(module)
        return out

    def unsynced(self, module: nn.Module) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._accelerator.no_sync(module)
        return context

    def summed(self, value: Tensor) -> Tensor:
        out: Tensor = self._accelerator.reduce(value, reduction="sum")
        return out

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()


def find_ranks(device: str) -> Ranks:
    """By what the launcher put into the environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Accelerated(device)
    return Ranks(device)
