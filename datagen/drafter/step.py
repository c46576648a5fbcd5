"""The loss of one micro-batch, as a module that DDP can wrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from datagen.drafter.attention import attention_for
from datagen.drafter.dataset import FinalNorm
from datagen.drafter.loss import Goal, goal_of, pair_losses, pairs_of
from datagen.drafter.model import Drafter, unrolled
from datagen.drafter.rows import Batch
from datagen.drafter.settings import TrainConfig
from datagen.drafter.target import Target
from datagen.drafter.vocab import DraftVocab


@dataclass(slots=True)
class Sums:
    """By depth: summed loss, trained pairs, hits among them [3, K]; and rows with what is no number."""

    table_3K: Tensor
    bad_A: Tensor


class StepLoss(nn.Module):
    """`forward(batch, weight_K)`: (sum over pairs of weight[depth] x loss, Sums).

    The sum is NaN where a row of the mask is damaged, whether it trains or not.
    `fixed`: the kernels depend on nothing but the batch's shapes, so that they can be recorded.
    """

    def __init__(
        self, drafter: Drafter, target: Target, vocab: DraftVocab, config: TrainConfig, *,
        final_norm: FinalNorm, attention: str, compiled: bool, fixed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.drafter, self.fixed = drafter, fixed
        self._target, self._config = target, config
        self._final_norm, self._attention, self._compiled = final_norm, attention, compiled
        device = target.embed_VH.device
        # Plain attributes, not buffers: none of it is the drafter's, or to be sent between ranks.
        self._t2d_V = vocab.t2d.to(device)
        self._draft_ids_V = vocab.draft_ids.to(device)
        self._head_UH = target.draft_head(torch.from_numpy(vocab.target_ids_U).to(device))

    def forward(self, batch: Batch, weight_K: Tensor) -> tuple[Tensor, Sums]:
        config, drafter = self._config, self.drafter
        attend = attention_for(batch, self._attention, batch.tokens_M.device)
        h_AKH = unrolled(drafter, batch, self._target.embed_VH, attend, config.depths)
        if config.loss == "ce":
            goal = Goal(None, None)
        else:
            goal = goal_of(
                batch, self._target, self._head_UH, t2d_V=self._t2d_V,
                final_norm=self._final_norm, drop_outside=config.drop_outside,
            )  # fmt: skip
        pairs = pairs_of(batch, goal, self._draft_ids_V, config.loss, every=self.fixed)
        weight_P = weight_K[pairs.depth_P]
        if pairs.trained_P is None:
            h_PH = h_AKH[pairs.row_P, pairs.depth_P]
        else:
            h_PH, weight_P = h_AKH.flatten(0, 1), weight_P * pairs.trained_P
        total, loss_P, choice_P = pair_losses(
            drafter.norm(h_PH), drafter.lm_head.weight, goal, pairs, weight_P, config.loss,
            compiled=self._compiled,
        )  # fmt: skip
        with torch.no_grad():
            hit_P = (choice_P == pairs.draft_label_P).float()
            values_P3 = torch.stack([loss_P, torch.ones_like(loss_P), hit_P], dim=1)
            if pairs.trained_P is not None:
                values_P3 = values_P3.where(pairs.trained_P[:, None], 0.0)
            table_K3 = torch.zeros(config.depths, 3, device=loss_P.device)
            table_K3.index_add_(0, pairs.depth_P, values_P3)
            bad_A = torch.zeros(len(h_AKH), device=loss_P.device)
            bad_A.index_add_(0, pairs.row_P, (~loss_P.isfinite()).float())
            bad_A = (bad_A > 0) | _damaged(batch, h_AKH, goal)
            # Damage stops training also where the choice that it spoils keeps its rows from training.
            stop = torch.zeros_like(total).masked_fill(bad_A.any(), torch.nan)
        return total + stop, Sums(table_K3.t(), bad_A)


def _damaged(batch: Batch, h_AKH: Tensor, goal: Goal) -> Tensor:
    """bool [A]: rows with a pair of the mask whose state or goal is no number.

    Before goals outside the draft vocabulary are left out: which token a NaN chooses says nothing.
    """
    sound_AK = h_AKH.sum(-1, dtype=torch.float32).isfinite()
    if goal.logits_AU is not None:
        sound_AK &= goal.logits_AU.sum(-1).isfinite()[batch.target_AK]
    return (batch.mask_AK & ~sound_AK).any(dim=1)


def depth_weights(
    config: TrainConfig, rows: tuple[int, ...], tokens: int, device: torch.device
) -> Tensor:
    """float32 [K]: what a pair of each depth counts, for a step of `rows` trained rows and `tokens`.

    Of the whole optimizer step, so that neither packing, accumulation nor ranks change the loss.
    """
    size = [tokens] * len(rows) if config.normalise == "positions" else [max(1, r) for r in rows]
    weights = [config.decay**k / n for k, n in enumerate(size)]
    return torch.tensor(weights, dtype=torch.float32, device=device)


def row_loss(by_depth: Sequence[float], decay: float) -> float:
    """The loss of a trained row, its depths weighted as in training.

    What is minimised may be divided by all tokens of a step: from step to step that number leaps with
    the share of context in the batch, and says nothing of how well the drafter does.
    """
    weights = [decay**k for k in range(len(by_depth))]
    return sum(w * x for w, x in zip(weights, by_depth, strict=True)) / sum(weights)


def bad_samples(batch: Batch, bad_A: Tensor) -> list[str]:
    """Samples with a row whose loss, state or goal is no number."""
    parts = torch.split(bad_A.cpu()[: sum(batch.active)], list(batch.active))
    return [s for s, part in zip(batch.sample_ids, parts, strict=True) if bool(part.any())]
