"""AdamW or Muon over float32 masters, the schedule, and averaged weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from datagen.drafter.settings import TrainConfig

# Of Muon: PyTorch 2.13's defaults but for adjust_lr_fn, said here so that no other version's decide.
MUON: dict[str, Any] = {
    "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7, "adjust_lr_fn": "match_rms_adamw",
}  # fmt: skip
KEPT_BY_MUON = ("momentum_buffer",)
KEPT_BY_ADAMW = ("step", "exp_avg", "exp_avg_sq")


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Of step `step` (from 0) of `total`: linear warm-up, then a cosine down to the floor."""
    warm = math.ceil(config.warmup * total)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    progress = (step - warm) / max(1, total - warm)
    shape = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.floor + (1 - config.floor) * shape)


class Optimizers:
    """Optimizers of disjoint parts of the weights, as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parts; each takes its learning rate from there."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Change the weights."""
        for part in self.parts:
            part.step()


def optimizers(drafter: nn.Module, config: TrainConfig, device: torch.device) -> Optimizers:
    """AdamW; with `muon` the matrices but lm_head are Muon's. Norm weights do not decay."""
    named = dict(drafter.named_parameters())
    matrices = [n for n, p in named.items() if p.dim() > 1]
    turned = [n for n in matrices if config.optimizer == "muon" and not n.startswith("lm_head.")]
    adamw = torch.optim.AdamW(
        [
            {
                "params": [named[n] for n in matrices if n not in turned],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type == "cuda",
    )
    if not turned:
        return Optimizers(adamw)
    muon = torch.optim.Muon(
        [named[n] for n in turned], lr=config.learning_rate, weight_decay=config.weight_decay,
        **MUON,
    )  # fmt: skip
    return Optimizers(muon, adamw)


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


def moments(optimizer: Optimizers, drafter: nn.Module) -> dict[str, Tensor]:
    """What the optimizers keep by parameter name, such as `exp_avg.*`; empty before a step."""
    names: dict[Tensor, str] = {p: n for n, p in drafter.named_parameters()}
    return {
        f"{key}.{names[parameter]}": value
        for part in optimizer.parts
        for parameter, kept in part.state.items()
        for key, value in kept.items()
    }


def restore_moments(optimizer: Optimizers, drafter: nn.Module, stored: dict[str, Tensor]) -> None:
    """Put back what `moments` gave; raises KeyError when a parameter has none."""
    names: dict[Tensor, str] = {p: n for n, p in drafter.named_parameters()}
    for part in optimizer.parts:
        keys = KEPT_BY_MUON if isinstance(part, torch.optim.Muon) else KEPT_BY_ADAMW
        for parameter in (p for group in part.param_groups for p in group["params"]):
            part.state[parameter] = {
                key: stored[f"{key}.{names[parameter]}"].to(parameter.device) for key in keys
            }
