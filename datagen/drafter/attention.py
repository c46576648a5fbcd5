"""Attention of query rows over depth-0 rows of their own sample, with its log-sum-exp.

Two forms of the same mathematics: `eager` goes sample by sample with plain products (CPU, exact,
differentiable everywhere), `flex` hands the packed batch to a fused kernel with a block mask (CUDA).
Both give the log-sum-exp, so that a row's own deeper keys can be merged in afterwards.

Shape suffixes: A query rows, M rows, Q query heads, J key heads, G = Q/J, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from datagen.drafter.rows import Batch
from datagen.errors import ConfigError

Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q_AQD, k_MJD, v_MJD) -> attended [A, Q, D] and log-sum-exp float32 [A, Q]."""
FLEX_MULTIPLE = 2048  # rows are padded to it: few shapes, few compilations


def attention_for(batch: Batch, kind: str, device: torch.device) -> Attention:
    """`kind`: eager, flex, or auto (flex on CUDA)."""
    if kind == "auto":
        kind = "flex" if device.type == "cuda" else "eager"
    if kind == "eager":
        return lambda q, k, v: _eager(q, k, v, batch)
    if kind == "flex":
        return _flex(batch, device)
    raise ConfigError(f"unknown attention '{kind}'", fix="use auto, eager or flex")


def merged(
    q_AQD: Tensor, past_AQD: Tensor, lse_AQ: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention over the past and a row's `own` keys and values [A, J, D] of deeper steps."""
    groups = q_AQD.shape[1] // own[0][0].shape[1]
    q = q_AQD.float() / math.sqrt(q_AQD.shape[-1])
    scores = [(q * k.repeat_interleave(groups, 1).float()).sum(-1) for k, _ in own]
    total_AQ = torch.logsumexp(torch.stack([lse_AQ, *scores], dim=-1), dim=-1)
    out = past_AQD.float() * (lse_AQ - total_AQ).exp()[..., None]
    for score, (_, v) in zip(scores, own, strict=True):
        out = out + v.repeat_interleave(groups, 1).float() * (score - total_AQ).exp()[..., None]
    return out.to(q_AQD.dtype)


def _eager(q_AQD: Tensor, k_MJD: Tensor, v_MJD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    groups = q_AQD.shape[1] // k_MJD.shape[1]
    outs, sums = [], []
    samples = zip(
        torch.split(q_AQD, list(batch.active)), torch.split(k_MJD, list(batch.rows)),
        torch.split(v_MJD, list(batch.rows)), strict=True,
    )  # fmt: skip
    for q, k, v in samples:
        q_QAD = q.transpose(0, 1)
        k_QTD = k.repeat_interleave(groups, 1).transpose(0, 1)
        v_QTD = v.repeat_interleave(groups, 1).transpose(0, 1)
        scores = (q_QAD @ k_QTD.transpose(1, 2)).float() / math.sqrt(q.shape[-1])
        ahead = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(ahead.triu(len(k) - len(q) + 1), -torch.inf)
        lse_QA = torch.logsumexp(scores, dim=-1)
        weights = (scores - lse_QA[..., None]).exp().to(v.dtype)
        outs.append((weights @ v_QTD).transpose(0, 1))
        sums.append(lse_QA.transpose(0, 1))
    return torch.cat(outs), torch.cat(sums)


@cache
def _compiled(device_type: str) -> Any:
    from torch.nn.attention import flex_attention as flex

    if device_type != "cuda":
        return flex.flex_attention
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex.flex_attention, dynamic=False)


def _flex(batch: Batch, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    n_q, n_k = sum(batch.active), sum(batch.rows)
    multiple = FLEX_MULTIPLE if device.type == "cuda" else 1
    pad_q, pad_k = -n_q % multiple, -n_k % multiple

    def numbered(counts: tuple[int, ...], padding: int, filler: int) -> Tensor:
        sample = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return torch.cat([sample, torch.full((padding,), filler)]).to(device)

    sample_q, sample_k = numbered(batch.active, pad_q, -1), numbered(batch.rows, pad_k, -2)
    row_q = torch.cat([batch.active_A.to(device), torch.zeros(pad_q, dtype=torch.long).to(device)])
    # A padding query sees key 0 alone: a row without any key would give NaN, and NaN gradients.
    padding_q = torch.arange(n_q + pad_q, device=device) >= n_q

    def allowed(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (sample_q[q] == sample_k[k]) & (k <= row_q[q])
        return seen | (padding_q[q] & (k == 0))

    mask = create_block_mask(allowed, None, None, n_q + pad_q, n_k + pad_k, device=device)
    kernel = _compiled(device.type)

    def attend(q_AQD: Tensor, k_MJD: Tensor, v_MJD: Tensor) -> tuple[Tensor, Tensor]:
        def heads_first(x: Tensor, padding: int) -> Tensor:
            return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None]

        out, aux = kernel(
            heads_first(q_AQD, pad_q), heads_first(k_MJD, pad_k), heads_first(v_MJD, pad_k),
            block_mask=mask, enable_gqa=q_AQD.shape[1] != k_MJD.shape[1],
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out[0].transpose(0, 1)[:n_q], aux.lse[0].transpose(0, 1)[:n_q]

    return attend
