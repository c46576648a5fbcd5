"""Rotary embeddings of a drafter: default, llama3 and YaRN, exactly as SGLang and transformers do.

Types whose angles depend on the length of the sequence (dynamic, longrope) are refused: a drafter
trained at one length would be served at another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datagen.errors import ConfigError

_KNOWN = {
    "default": frozenset[str](),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "attn_factor", "attention_factor", "truncate"}
    ),
}  # fmt: skip
_NEEDED = {
    "default": frozenset[str](),
    "llama3": _KNOWN["llama3"],
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """`kind`: default, llama3 or yarn; `scaling`: that kind's own numbers."""

    theta: float
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()

    @classmethod
    def read(cls, config: dict[str, Any], where: str) -> Rope:
        """From a config.json in either spelling; raises ConfigError for other types."""
        new = config.get("rope_parameters") or {}
        old = config.get("rope_scaling") or {}
        raw = {**old, **new}
        theta = new.get("rope_theta", config.get("rope_theta", old.get("rope_theta", 10_000.0)))
        kind = str(raw.pop("rope_type", raw.pop("type", "default")))
        for name in ("rope_theta", "type", "rope_type"):
            raw.pop(name, None)
        if kind not in _KNOWN:
            raise ConfigError(
                f"rotary type '{kind}' is not supported", where=where,
                fix=f"use a drafter with one of {', '.join(_KNOWN)}",
            )  # fmt: skip
        given = {k: v for k, v in raw.items() if v is not None}
        unknown, missing = set(given) - _KNOWN[kind], _NEEDED[kind] - set(given)
        if unknown or missing:
            text = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
            raise ConfigError(f"rotary settings of '{kind}': {text}", where=where)
        scaling = tuple(sorted((k, float(v)) for k, v in given.items()))
        return cls(float(theta), kind, scaling)

    def spelled(self) -> dict[str, Any]:
        """config.json keys in both spellings, theta inside as well (SGLang >= 0.5.13 reads that)."""
        whole = {
            k: bool(v) if k == "truncate" else int(v) if v == int(v) and "max_" in k else v
            for k, v in self.scaling
        }
        scaling = None if self.kind == "default" else {"rope_type": self.kind, **whole}
        return {
            "rope_theta": self.theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": self.kind, "rope_theta": self.theta, **whole},
        }

    def table(self, head_dim: int) -> tuple[Tensor, float]:
        """(inverse frequencies float32 [D/2], factor on cos and sin)."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequency = 1.0 / self.theta**exponent
        numbers = dict(self.scaling)
        if self.kind == "llama3":
            return _llama3(frequency, numbers), 1.0
        if self.kind == "yarn":
            return _yarn(frequency, numbers, self.theta, head_dim)
        return frequency, 1.0


def _llama3(frequency: Tensor, n: dict[str, float]) -> Tensor:
    original = n["original_max_position_embeddings"]
    low, high = n["low_freq_factor"], n["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / n["factor"] + smooth * frequency
    scaled = torch.where(wavelength > original / low, frequency / n["factor"], between)
    return torch.where(wavelength < original / high, frequency, scaled)


def _yarn(
    frequency: Tensor, n: dict[str, float], theta: float, head_dim: int
) -> tuple[Tensor, float]:
    factor, original = n["factor"], n["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(theta))

    low, high = dimension(n.get("beta_fast", 32.0)), dimension(n.get("beta_slow", 1.0))
    if n.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    half = torch.arange(head_dim // 2, dtype=torch.float32)
    extrapolated = 1 - ((half - low) / (high - low)).clamp(0, 1)
    mixed = frequency / factor * (1 - extrapolated) + frequency * extrapolated

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in n:
        return mixed, n["attention_factor"]
    both = n.get("mscale") is not None and n.get("mscale_all_dim") is not None
    size = magnitude(n["mscale"]) / magnitude(n["mscale_all_dim"]) if both else magnitude(1.0)
    return mixed, size * n.get("attn_factor", 1.0)


def cos_sin(table: tuple[Tensor, float], positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [N, 1, D], for every head; angles are computed in float32."""
    frequency, size = table
    angles = positions_N[:, None].float() * frequency.to(positions_N.device)
    both = torch.cat([angles, angles], dim=-1)[:, None]
    return both.cos() * size, both.sin() * size


def rotated(x_NKD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Heads turned by their positions: neox halves, in float32, given back in x's dtype."""
    x = x_NKD.float()
    low, high = x.chunk(2, dim=-1)
    return (x * cos_N1D + torch.cat([-high, low], dim=-1) * sin_N1D).to(x_NKD.dtype)
