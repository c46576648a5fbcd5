"""The loss of an unroll: divergences over the draft vocabulary, fused with lm_head.

kl  KL(p || q), p the target's distribution renormalised over the draft vocabulary
lk  -log sum_v min(p_v, q_v): the negative log of the acceptance of rejection sampling
ce  -log q(recorded token): needs no final state

The logits of all trained [row, depth] pairs would be tens of gigabytes at Kimi's size. They exist for
a chunk of pairs at a time: the gradient of each chunk is taken while its logits are there, and kept
as gradients of the states [P, H] and of lm_head [U, H] alone, so that nothing is computed twice.

Shape suffixes: P trained pairs, A query rows, K depths, U draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datagen.drafter.rows import NO_LABEL, Batch
from datagen.drafter.settings import LossKind
from datagen.drafter.target import Target

LOGITS_AT_ONCE = 1 << 26


def chunk_of(vocab: int) -> int:
    """Pairs whose logits are held at a time: 2,048 at 32,000 draft tokens, more of a smaller map.

    Always a multiple of 2,048: an odd size keeps matrix products off the fast kernels.
    """
    return 2048 * max(1, LOGITS_AT_ONCE // vocab // 2048)


@dataclass(frozen=True, slots=True)
class Goal:
    """What the pairs are compared with. `logits_AU` float32: the target's, or None for ce.

    `inside_A`: the target's first choice over the full vocabulary is a draft token.
    """

    logits_AU: Tensor | None
    inside_A: Tensor | None


@torch.no_grad()
def goal_of(
    batch: Batch, target: Target, draft_head_UH: Tensor, *, t2d_V: Tensor, final_norm: str,
    drop_outside: bool,
) -> Goal:  # fmt: skip
    """The target's distributions for the query rows of a batch; states are read once."""
    assert batch.final_AH is not None
    final_AH = target.post_norm(batch.final_AH, final_norm)
    logits_AU = target.draft_logits(final_AH, draft_head_UH)
    inside_A = t2d_V[target.choice(final_AH)] if drop_outside else None
    return Goal(logits_AU, inside_A)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs in row order. `row_P`, `depth_P`: which; `target_P`: where in A its state is.

    `trained_P`: None where all of them train.
    """

    row_P: Tensor
    depth_P: Tensor
    target_P: Tensor
    draft_label_P: Tensor
    trained_P: Tensor | None = None


def pairs_of(
    batch: Batch, goal: Goal, draft_ids: Tensor, kind: LossKind, *, every: bool = False
) -> Pairs:
    """Pairs of the mask, less those whose goal no draft token can be.

    `draft_ids`: draft id of each target id, or NO_LABEL. `every`: also those that do not train, marked:
    how many train need not be waited for then.
    """
    mask_AK = batch.mask_AK
    label_AK = torch.where(
        batch.labels_AK == NO_LABEL, NO_LABEL, draft_ids[batch.labels_AK.clamp(min=0)]
    )
    if kind == "ce":
        mask_AK = mask_AK & (label_AK != NO_LABEL)
    elif goal.inside_A is not None:
        mask_AK = mask_AK & goal.inside_A[batch.target_AK]
    if every:
        rows, depths = mask_AK.shape
        at_P = torch.arange(rows * depths, device=mask_AK.device)
        row_P, depth_P = at_P // depths, at_P % depths
        label_P = label_AK.flatten().clamp(min=0) if kind == "ce" else label_AK.flatten()
        return Pairs(row_P, depth_P, batch.target_AK.flatten(), label_P, mask_AK.flatten())
    row_P, depth_P = mask_AK.nonzero(as_tuple=True)
    return Pairs(row_P, depth_P, batch.target_AK[row_P, depth_P], label_AK[row_P, depth_P])


def pair_losses(
    h_PH: Tensor, head_UH: Tensor, goal: Goal, pairs: Pairs, weight_P: Tensor, kind: LossKind,
    *, compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weighted sum, loss of each pair [P], draft argmax [P]); only the first carries a gradient.

    `h_PH`: after the norm. `weight_P`: what a pair's loss counts in the sum. The loss of a pair that
    does not train is 0, whatever its states hold.
    """
    total, loss_P, choice_P = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        h_PH, head_UH, goal.logits_AU, pairs.target_P, pairs.draft_label_P, weight_P,
        pairs.trained_P, kind, compiled,
    )  # fmt: skip
    return total, loss_P, choice_P


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_PH: Tensor, head_UH: Tensor, logits_AU: Tensor | None, target_P: Tensor,
        label_P: Tensor, weight_P: Tensor, trained_P: Tensor | None, kind: LossKind, compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        wanted = any(ctx.needs_input_grad[:2])
        weight_UH = head_UH.to(h_PH.dtype)
        losses, choices = [], []
        grad_PH = torch.zeros_like(h_PH) if wanted else None
        grad_UH = torch.zeros_like(head_UH) if wanted else None
        chunk = chunk_of(len(head_UH))
        for a in range(0, len(h_PH), chunk):
            z = slice(a, a + chunk)
            logits_CU = F.linear(h_PH[z], weight_UH).float()
            choices.append(logits_CU.argmax(dim=-1))
            goal_CU = None if logits_AU is None else logits_AU[target_P[z]]
            loss_C, slope_CU = _divergence(compiled)(logits_CU, goal_CU, label_P[z], kind)
            losses.append(loss_C)
            if grad_PH is not None and grad_UH is not None:
                slope_CU = (slope_CU * weight_P[z, None]).to(h_PH.dtype)
                if trained_P is not None:  # a weight of 0 does not: 0 x NaN is NaN
                    slope_CU.masked_fill_(~trained_P[z, None], 0.0)
                grad_PH[z] = slope_CU @ weight_UH
                grad_UH += (slope_CU.t() @ h_PH[z]).to(grad_UH.dtype)
        empty = h_PH.new_zeros(0, dtype=torch.float32)
        loss_P = torch.cat([empty, *losses])
        if trained_P is not None:
            loss_P = loss_P.where(trained_P, 0.0)
        choice_P = torch.cat([empty.long(), *choices])
        if grad_PH is not None:
            ctx.save_for_backward(grad_PH, grad_UH)
        ctx.mark_non_differentiable(loss_P, choice_P)
        return (loss_P * weight_P).sum(), loss_P, choice_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_PH, grad_UH = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_PH * scale.to(grad_PH.dtype),
            grad_UH * scale,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


@cache
def _divergence(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Fused where compiled: a chunk's logits are then read a few times instead of a dozen."""
    return torch.compile(divergence, dynamic=True) if compiled else divergence


def divergence(
    logits_CU: Tensor, goal_CU: Tensor | None, label_C: Tensor, kind: LossKind
) -> tuple[Tensor, Tensor]:
    """(loss [C], its slope with respect to the logits [C, U]); closed forms, all float32."""
    log_q = F.log_softmax(logits_CU, dim=-1)
    q = log_q.exp()
    if kind == "ce":
        loss = -log_q.gather(1, label_C[:, None])[:, 0]
        slope = q.clone()
        slope.scatter_add_(1, label_C[:, None], torch.full_like(loss, -1.0)[:, None])
        return loss, slope
    assert goal_CU is not None
    log_p = F.log_softmax(goal_CU, dim=-1)
    p = log_p.exp()
    if kind == "kl":
        return (p * (log_p - log_q)).sum(-1), q - p
    below = q < p
    accepted = torch.minimum(p, q).sum(-1).clamp_min(1e-12)
    share = (q * below).sum(-1, keepdim=True)
    return -accepted.log(), -q * (below.to(q.dtype) - share) / accepted[:, None]
