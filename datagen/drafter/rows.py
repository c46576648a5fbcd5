"""Which rows train, what each reads, and how samples are packed. The one place of the index rules.

Sample: x[0..N-1], context x[0..P-1], response x[P..N-1]. Row t = (g[t], x[t+1]); at depth k it reads
x[t+1+k], its target distribution is lm_head(f[t+1+k]) and its label x[t+2+k]. It trains iff
t >= P-1 and loss_mask[t+2+k] = 1, so the first trained row is P-1 (the engine's first draft after
the prefill) and the last, at depth 0, is N-3 (which predicts the stop token). Rows 0..P-2 are keys
of the attention and nothing else.

Shape suffixes: N tokens of a sample, M rows of all samples of a batch, A rows that are queries,
K depths, W = boundaries x H, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

NO_LABEL = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """`ids_N` int64; `n_context` = P; `features_NW`: boundaries in order; `final_NH`: or None."""

    sample_id: str
    ids_N: Tensor
    n_context: int
    features_NW: Tensor
    final_NH: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples packed end to end. Nothing of one sample is seen by another.

    `rows`, `active`: rows and query rows of each sample. `tokens_M` x[t+1], `positions_M` t.
    `active_A`: where in M a query row is; `start_A`: where its sample starts. `tokens_AK` x[t+1+k];
    `labels_AK` x[t+2+k], or NO_LABEL; `mask_AK`: trained. `target_AK`: where in A the state
    f[t+1+k] stands in `final_AH` (f[t+1]).
    """

    sample_ids: tuple[str, ...]
    rows: tuple[int, ...]
    active: tuple[int, ...]
    features_MW: Tensor
    tokens_M: Tensor
    positions_M: Tensor
    active_A: Tensor
    start_A: Tensor
    tokens_AK: Tensor
    labels_AK: Tensor
    mask_AK: Tensor
    target_AK: Tensor
    final_AH: Tensor | None

    @property
    def n_tokens(self) -> int:
        """Tokens of the samples, the last two of each included, which are no rows."""
        return sum(self.rows) + 2 * len(self.rows)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On `device`, states in `dtype`."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                kind = dtype if value.is_floating_point() else value.dtype
                moved[field.name] = value.to(device, non_blocking=True).to(kind)
        return replace(self, **moved)

    def pinned(self) -> Batch:
        """In page-locked memory, from which copies to a GPU need not be waited for."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        pinned: dict[str, Any] = {n: v.pin_memory() for n, v in values if isinstance(v, Tensor)}
        return replace(self, **pinned)


def padded(batch: Batch, rows: int, active: int) -> Batch:
    """The batch with at least `rows` rows and a multiple of `active` query rows.

    What is added trains nothing, and no sample sees it: a padding query sees one row, each another.
    """
    more_rows = max(0, rows - len(batch.tokens_M))
    more_active = -len(batch.active_A) % active
    seen = torch.arange(more_active) % (len(batch.tokens_M) + more_rows)
    grown: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            more = more_rows if field.name.endswith(("_M", "_MW")) else more_active
            own = field.name in ("active_A", "start_A")
            filler = seen if own else value.new_zeros((more, *value.shape[1:]))
            grown[field.name] = torch.cat([value, filler])
    return replace(batch, **grown)


def trained_rows(n_tokens: int, n_context: int, depth: int = 0) -> range:
    """The rows t of a sample that train at `depth`: P-1 .. N-3-depth, perhaps none."""
    if n_context < 1:
        raise ValueError("a sample without context has no row P-1")
    return range(n_context - 1, n_tokens - 2 - depth)


def trained_counts(n_tokens: int, n_context: int, depths: int) -> list[int]:
    """Trained rows of a sample at each depth."""
    return [len(trained_rows(n_tokens, n_context, k)) for k in range(depths)]


def loss_mask_of(n_tokens: int, n_context: int) -> Tensor:
    """bool [N]: 0 over the context, 1 over the response."""
    return torch.arange(n_tokens) >= n_context


def pack(samples: Sequence[Sample], depths: int, masks: Sequence[Tensor] | None = None) -> Batch:
    """One batch of the samples. `masks`: an explicit [row, depth] bool mask per sample, rows 0..N-3,

    instead of the rule above: a parity test passes another trainer's. ValueError when a mask names
    what has no label.
    """
    parts: dict[str, list[Tensor]] = {
        n: []
        for n in (
            "features",
            "tokens",
            "positions",
            "active",
            "start",
            "in",
            "label",
            "mask",
            "target",
        )
    }
    finals: list[Tensor] = []
    rows: list[int] = []
    active: list[int] = []
    for number, sample in enumerate(samples):
        n = len(sample.ids_N)
        wanted = None if masks is None else masks[number]
        first = sample.n_context - 1
        if wanted is not None:
            used = wanted.any(dim=1).nonzero()
            first = int(used[0]) if len(used) else n - 3
        t_A = torch.arange(first, n - 2)
        step_AK = t_A[:, None] + torch.arange(depths)
        has_label_AK = step_AK + 2 < n
        label_AK = sample.ids_N[(step_AK + 2).clamp(max=n - 1)]
        mask_AK = has_label_AK & loss_mask_of(n, sample.n_context)[(step_AK + 2).clamp(max=n - 1)]
        mask_AK &= t_A[:, None] >= sample.n_context - 1
        if wanted is not None:
            mask_AK = wanted[first:]
            if bool((mask_AK & ~has_label_AK).any()):
                raise ValueError(f"{sample.sample_id}: the mask trains a row that has no label")
        parts["features"].append(sample.features_NW[: n - 2])
        parts["tokens"].append(sample.ids_N[1 : n - 1])
        parts["positions"].append(torch.arange(n - 2))
        parts["active"].append(t_A + sum(rows))
        parts["start"].append(torch.full_like(t_A, sum(rows)))
        parts["in"].append(
            torch.where(step_AK + 1 < n, sample.ids_N[(step_AK + 1).clamp(max=n - 1)], 0)
        )
        parts["label"].append(torch.where(has_label_AK, label_AK, NO_LABEL))
        parts["mask"].append(mask_AK)
        parts["target"].append((step_AK - first).clamp(max=len(t_A) - 1) + sum(active))
        if sample.final_NH is not None:
            finals.append(sample.final_NH[first + 1 : n - 1])
        rows.append(n - 2)
        active.append(len(t_A))
    joined = {name: torch.cat(values) for name, values in parts.items()}
    return Batch(
        sample_ids=tuple(s.sample_id for s in samples),
        rows=tuple(rows),
        active=tuple(active),
        features_MW=joined["features"],
        tokens_M=joined["tokens"],
        positions_M=joined["positions"],
        active_A=joined["active"],
        start_A=joined["start"],
        tokens_AK=joined["in"],
        labels_AK=joined["label"],
        mask_AK=joined["mask"],
        target_AK=joined["target"],
        final_AH=torch.cat(finals) if len(finals) == len(samples) else None,
    )
