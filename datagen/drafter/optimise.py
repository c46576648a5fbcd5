"""AdamW over float32 masters, its schedule, and averaged weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from datagen.drafter.settings import TrainConfig


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Of step `step` (from 0) of `total`: linear warm-up, then a cosine down to the floor."""
    warm = math.ceil(config.warmup * total)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    progress = (step - warm) / max(1, total - warm)
    shape = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.floor + (1 - config.floor) * shape)


def adamw(drafter: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """Norm weights do not decay."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type == "cuda",
    )


class Average:
    """Exponential moving average of the weights, without bias towards the start."""

    def __init__(self, drafter: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {n: p.detach().clone() for n, p in drafter.named_parameters()}

    @torch.no_grad()
    def update(self, drafter: nn.Module, step: int) -> None:
        """After step `step` (from 0). Early on the average is short: (1 + n) / (10 + n)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in drafter.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 1 - decay)


@contextlib.contextmanager
def averaged(drafter: nn.Module, average: Average | None) -> Iterator[None]:
    """Within: the drafter has the averaged weights, where there are any."""
    if average is None:
        yield
        return
    own = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    drafter.load_state_dict(average.weights, strict=False)
    try:
        yield
    finally:
        drafter.load_state_dict(own, strict=False)


def moments(optimizer: torch.optim.Optimizer, drafter: nn.Module) -> dict[str, Tensor]:
    """Adam's state by parameter name: `exp_avg.*`, `exp_avg_sq.*`, `step.*`; empty before a step."""
    found: dict[str, Tensor] = {}
    for name, parameter in drafter.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key}.{name}"] = value
    return found


def restore_moments(
    optimizer: torch.optim.Optimizer, drafter: nn.Module, stored: dict[str, Tensor]
) -> None:
    """Put Adam's state back; raises KeyError when a parameter has none."""
    for name, parameter in drafter.named_parameters():
        optimizer.state[parameter] = {
            "step": stored[f"step.{name}"].cpu()
            if parameter.device.type == "cpu"
            else stored[f"step.{name}"].to(parameter.device),
            "exp_avg": stored[f"exp_avg.{name}"].to(parameter.device),
            "exp_avg_sq": stored[f"exp_avg_sq.{name}"].to(parameter.device),
        }
