"""Next tokens from logits, with SGLang's sampling parameters.

A seeded draw is a pure function of seed, position and logits: inverse transform of a uniform number
hashed from seed and position, over the tokens that top_k, top_p and min_p keep.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIKELY = (256, 4096)  # tried before the whole vocabulary, which takes 20 times longer to sort


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


def scored(
    logits_V: Tensor, params: SamplingParams, token: int, top: int
) -> tuple[float, list[tuple[float, int]]]:
    """Log-probability of `token`, and the `top` likeliest as (log-probability, id), best first."""
    if params.temperature > 0:  # as SGLang: the distribution that was drawn from
        logits_V = logits_V / params.temperature
    scores_V = torch.log_softmax(logits_V.float(), dim=-1)
    values, ids = scores_V.topk(min(top, len(scores_V)))
    return float(scores_V[token]), list(zip(values.tolist(), ids.tolist(), strict=True))


def _draw(logits_V: Tensor, p: SamplingParams, u: float) -> int:
    probabilities_V = torch.softmax(logits_V / p.temperature, dim=-1)
    size = len(probabilities_V)
    top_k = size if p.top_k <= 0 else min(p.top_k, size)
    if top_k == size and p.top_p >= 1 and p.min_p <= 0:
        return _invert(probabilities_V, u)  # nothing is cut, so nothing need be sorted
    for count in (*LIKELY, size):
        values, ids = probabilities_V.topk(min(count, top_k))
        if len(values) == top_k or float(values.sum()) >= p.top_p:
            break
    before = values.cumsum(0) - values
    kept = values[(before < p.top_p) & (values >= p.min_p * values[0])]
    return int(ids[_invert(kept, u)])


def _invert(weights_N: Tensor, u: float) -> int:
    """The index at which the cumulative weight passes `u` of the whole."""
    cumulative = weights_N.double().cumsum(0)
    index = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    return min(index, len(weights_N) - 1)
