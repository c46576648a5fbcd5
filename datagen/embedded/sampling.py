"""Next tokens from logits, with SGLang's sampling parameters.

A seeded draw is a pure function of seed, position and logits: inverse transform of a uniform number
hashed from seed and position, over the kept tokens in order of probability.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIKELY = 256  # almost always enough for top_p; a full sort of the vocabulary costs ten times more


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's names. `temperature` 0 is greedy, `top_k` -1 is all."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


def uniform(seed: int, position: int) -> float:
    """In [0, 1), from seed and position alone."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def next_tokens(
    logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """One token per row; `positions` counts the tokens each request has generated so far."""
    tokens: list[int] = logits_BV.argmax(-1).tolist()
    for row, p in enumerate(params):
        if p.temperature > 0 and p.top_k != 1:
            seed = secrets.randbits(63) if p.sampling_seed is None else p.sampling_seed
            tokens[row] = _draw(logits_BV[row], p, uniform(seed, positions[row]))
    return tokens


def _draw(logits_V: Tensor, p: SamplingParams, u: float) -> int:
    probabilities_V = torch.softmax(logits_V / p.temperature, dim=-1)
    top_k = len(probabilities_V) if p.top_k <= 0 else min(p.top_k, len(probabilities_V))
    values, ids = probabilities_V.topk(min(LIKELY, top_k))
    if len(values) < top_k and float(values.sum()) < p.top_p:
        values, ids = probabilities_V.sort(descending=True)
        values, ids = values[:top_k], ids[:top_k]
    before = values.cumsum(0) - values
    kept = values[(before < p.top_p) & (values >= p.min_p * values[0])]
    cumulative = kept.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    return int(ids[min(index, len(kept) - 1)])
