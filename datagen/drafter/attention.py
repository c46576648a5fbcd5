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
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_leaves

from datagen.drafter.rows import Batch
from datagen.errors import ConfigError

Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q_AQD, k_MJD, v_MJD) -> attended [A, Q, D] and log-sum-exp float32 [A, Q]."""
FLEX_MULTIPLE = 2048  # rows are padded to it: few shapes, few compilations
BLOCK = 128  # rows of a block of flex attention's mask


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
    rows, _, size = q_AQD.shape
    heads = own[0][0].shape[1]
    q_AJGD = (q_AQD.float() / math.sqrt(size)).reshape(rows, heads, -1, size)
    lse_AJG = lse_AQ.reshape(rows, heads, -1)
    scores = [(q_AJGD * k[:, :, None].float()).sum(-1) for k, _ in own]
    total_AJG = torch.logsumexp(torch.stack([lse_AJG, *scores], dim=-1), dim=-1)
    past_AJGD = past_AQD.float().reshape(rows, heads, -1, size)
    out: Tensor = past_AJGD * (lse_AJG - total_AJG).exp()[..., None]
    for score, (_, v) in zip(scores, own, strict=True):
        out = out + v[:, :, None].float() * (score - total_AJG).exp()[..., None]
    return out.flatten(1, 2).to(q_AQD.dtype)


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled: a few kernels for its dozens. Rows vary from batch to batch."""
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(function)

    def call(*args: Any) -> Any:
        for tensor in tree_leaves(args):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args)

    return call


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
    from torch.nn.attention.flex_attention import AuxRequest

    n_q, n_k = len(batch.active_A), len(batch.tokens_M)
    multiple = FLEX_MULTIPLE if device.type == "cuda" else BLOCK
    pad_q, pad_k = -n_q % multiple, -n_k % multiple
    # A query sees the rows first..last of its own sample: an interval. A padding query sees key 0
    # alone: a row without any key would give NaN, and NaN gradients.
    first_q, last_q = (F.pad(x, (0, pad_q)) for x in (batch.start_A, batch.active_A))

    def allowed(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (first_q[q] <= k) & (k <= last_q[q])

    mask = _block_mask(first_q, last_q, n_k + pad_k, allowed)
    kernel = _compiled(device.type)

    def heads_first(x: Tensor, padding: int) -> Tensor:
        return (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x).transpose(0, 1)[None]

    # Every depth attends to the same keys and values: they are padded once.
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def attend(q_AQD: Tensor, k_MJD: Tensor, v_MJD: Tensor) -> tuple[Tensor, Tensor]:
        if not kept or kept[0][0] is not k_MJD or kept[0][1] is not v_MJD:
            padded = heads_first(k_MJD, pad_k), heads_first(v_MJD, pad_k)
            kept[:] = [(k_MJD, v_MJD, *padded)]
        out, aux = kernel(
            heads_first(q_AQD, pad_q), kept[0][2], kept[0][3], block_mask=mask,
            enable_gqa=q_AQD.shape[1] != k_MJD.shape[1], return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out[0].transpose(0, 1)[:n_q], aux.lse[0].transpose(0, 1)[:n_q]

    return attend


def _block_mask(first_q: Tensor, last_q: Tensor, n_k: int, allowed: Any) -> Any:
    """Which blocks of keys a block of queries needs, from their intervals.

    `create_block_mask` asks about every pair of query and key: time and memory in the square of the
    batch's tokens, in dozens of kernels a step.
    """
    from torch.nn.attention.flex_attention import BlockMask

    low_j = torch.arange(0, n_k, BLOCK, device=first_q.device)
    high_j = (low_j + BLOCK - 1).clamp(max=n_k - 1)
    some_qj = (first_q[:, None] <= high_j) & (last_q[:, None] >= low_j)
    whole_qj = (first_q[:, None] <= low_j) & (last_q[:, None] >= high_j)
    some_ij = some_qj.view(-1, BLOCK, len(low_j)).any(dim=1)
    whole_ij = whole_qj.view(-1, BLOCK, len(low_j)).all(dim=1)

    def listed(marked_ij: Tensor) -> tuple[Tensor, Tensor]:
        counts = marked_ij.sum(dim=-1, dtype=torch.int32)
        order = marked_ij.int().argsort(dim=-1, descending=True, stable=True).int()
        return counts[None, None], order[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some_ij & ~whole_ij), *listed(whole_ij), BLOCK_SIZE=BLOCK, mask_mod=allowed,
        seq_lengths=(len(first_q), n_k),
    )  # fmt: skip
