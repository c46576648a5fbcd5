"""Acceptance by depth, over all rows of some data: conditional acceptance and predicted accept_len.

A hit at depth k: the proposed token, as a target id, is the recorded one. Rows are fed the recorded
tokens, which are the drafter's own as long as all earlier depths hit, so the conditional chain is
that of drafting. A token outside the draft vocabulary is a miss: nothing can propose it. Averaged
over all rows this is a training metric (predicted_accept_len), not the served accept_len.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from datagen.drafter.attention import attention_for
from datagen.drafter.loss import chunk_of
from datagen.drafter.model import Drafter, unrolled
from datagen.drafter.rows import NO_LABEL, Batch
from datagen.drafter.target import Target


@dataclass(slots=True)
class Acceptance:
    """Sums by depth; `eligible[k]`: rows where depth k has a token to compare and 0..k-1 hit."""

    hits: list[int]
    eligible: list[int]
    labels: Counter[int] = field(default_factory=Counter)
    agreeing: int = 0
    compared: int = 0
    mass: float = 0.0

    @classmethod
    def of(cls, depths: int) -> Acceptance:
        """Nothing counted yet."""
        return cls([0] * depths, [0] * depths)

    def add(self, hit_AK: Tensor, exists_AK: Tensor) -> None:
        """Count rows: bool [A, K] each."""
        alive_A = torch.ones(len(hit_AK), dtype=torch.bool, device=hit_AK.device)
        for k in range(hit_AK.shape[1]):
            alive_A = alive_A & exists_AK[:, k]
            self.eligible[k] += int(alive_A.sum())
            alive_A = alive_A & hit_AK[:, k]
            self.hits[k] += int(alive_A.sum())

    @property
    def conditional(self) -> list[float]:
        """a_k of depths 1..K; 0 where no row was eligible."""
        return [h / n if n else 0.0 for h, n in zip(self.hits, self.eligible, strict=True)]

    @property
    def predicted_accept_len(self) -> float:
        """1 + sum over k of the product of a_1..a_k."""
        total, product = 1.0, 1.0
        for a in self.conditional:
            product *= a
            total += product
        return total

    @property
    def best_constant(self) -> float:
        """The share of hits at depth 1 of always proposing the most frequent token: chance."""
        return max(self.labels.values(), default=0) / max(1, self.labels.total())

    def as_dict(self) -> dict[str, Any]:
        """For logs and provenance."""
        return {
            "predicted_accept_len": self.predicted_accept_len,
            "conditional_acceptance": self.conditional,
            "rows": self.eligible[0],
            "best_constant": self.best_constant,
            "target_agreement": self.agreeing / self.compared if self.compared else None,
            "draft_vocab_mass": self.mass / self.compared if self.compared else None,
        }


@torch.no_grad()
def measure(
    drafter: Drafter, target: Target, batches: Iterable[Batch], *, depths: int, attention: str,
    final_norm: str | None,
) -> Acceptance:  # fmt: skip
    """Acceptance of a drafter over batches already on its device.

    `final_norm` None: no final states, so that nothing is said of the target's own agreement.
    """
    result = Acceptance.of(depths)
    head_UH = drafter.lm_head.weight
    draft_head_UH = target.draft_head(drafter.target_ids(torch.arange(
        len(head_UH), device=head_UH.device)))  # fmt: skip
    chunk = chunk_of(len(head_UH))
    for batch in batches:
        attend = attention_for(batch, attention, batch.tokens_M.device)
        h_AKH = drafter.norm(unrolled(drafter, batch, target.embed_VH, attend, depths))
        flat = h_AKH.flatten(0, 1)
        choice = torch.cat(
            [drafter.lm_head(flat[a : a + chunk]).argmax(-1) for a in range(0, len(flat), chunk)]
        )
        proposed_AK = drafter.target_ids(choice).view(len(h_AKH), depths)
        exists_AK = batch.mask_AK & (batch.labels_AK != NO_LABEL)
        result.add(proposed_AK == batch.labels_AK, exists_AK)
        first_A = exists_AK[:, 0]
        labels_A = batch.labels_AK[:, 0]
        result.labels.update(labels_A[first_A].tolist())
        if final_norm is not None and batch.final_AH is not None:
            final_AH = target.post_norm(batch.final_AH, final_norm)
            best_A, lse_A = target.scan(final_AH)
            result.agreeing += int((best_A == labels_A)[first_A].sum())
            result.compared += int(first_A.sum())
            draft_lse_A = torch.cat([
                target.draft_logits(final_AH[a : a + chunk], draft_head_UH).logsumexp(-1)
                for a in range(0, len(final_AH), chunk)
            ])  # fmt: skip
            result.mass += float((draft_lse_A - lse_A).exp()[first_A].sum())
    return result
