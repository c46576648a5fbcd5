"""accept_len of a drafter on recorded responses, without the target.

When a verify cycle starts, the drafter's cache holds exactly rows 0..L-1 at depth 0, each computed from
the target's own features: nothing that was drafted survives verification. So one causal pass over all
rows gives every key the engine will ever have, and the chain drafted from row t reads those of rows
0..t and its own deeper ones: the attention of training-time test, fed with the drafter's own tokens.
A walk over integers (walk.py) then counts. Exact for chains (topk 1), greedy or sampled at the record's
own settings; a tree needs states of branches that were never generated.

Only rows that an engine drafts from are queries (t >= P-1), and a row whose drafts already disagree with
the record goes no deeper: no walk can get there.

Shape suffixes: N tokens of a sample, M rows of all samples of a batch, A rows that are queries, K draft
steps, Q query heads, J key heads, D head size, H hidden, V vocabulary, W boundaries x H.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from datagen.acceptance.metrics import Counts
from datagen.acceptance.walk import Step, counts_of, walk
from datagen.drafter.attention import merged
from datagen.drafter.model import Drafter, KeysValues
from datagen.drafter.rows import Sample
from datagen.errors import MeasurementError

NOT_DRAFTED = -1
ROWS_PER_BATCH = 4096
SCORES_AT_ONCE = 1 << 26
LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True, slots=True)
class Replayed:
    """One sample: its steps, what they count, and the drafts int64 [R-1, K] they go by."""

    sample: Sample
    steps: list[Step]
    counts: Counts
    drafts_RK: NDArray[np.int64]


@dataclass(slots=True)
class _Rows:
    """Query rows still drafting. `sample_A`: which sample of the batch; `row_A`: t; `out_A`: where

    in the batch's table of drafts.
    """

    sample_A: Tensor
    row_A: Tensor
    out_A: Tensor
    h_AH: Tensor
    tokens_A: Tensor
    own: list[KeysValues] = field(default_factory=list)

    def kept(self, alive_A: Tensor) -> _Rows:
        return _Rows(
            self.sample_A[alive_A], self.row_A[alive_A], self.out_A[alive_A],
            self.h_AH[alive_A], self.tokens_A[alive_A],
            [(k[alive_A], v[alive_A]) for k, v in self.own],
        )  # fmt: skip


class Replay:
    """A drafter at `steps` draft tokens a cycle. `embed_VH`: the target's embedding.

    `dtype`: of the drafter's arithmetic; float32 is exact, an engine serves bfloat16.
    """

    def __init__(
        self,
        drafter: Drafter,
        embed_VH: Tensor,
        *,
        steps: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        rows_per_batch: int = ROWS_PER_BATCH,
    ) -> None:
        if steps < 1:
            raise MeasurementError(f"replay needs at least one draft step, got {steps}")
        self.steps, self.dtype, self.device = steps, dtype, torch.device(device)
        own = copy.deepcopy(drafter)  # casting is done in place
        self._drafter = own.to(self.device, dtype).eval()
        self._embed_VH = embed_VH.to(self.device, dtype)
        self._rows_per_batch = rows_per_batch

    def run(
        self, samples: Iterable[Sample], tags: Mapping[str, Mapping[str, str]] | None = None
    ) -> Iterator[Replayed]:
        """Replay samples in order. `tags`: slices by sample id. Raises MeasurementError."""
        for batch in self._batches(samples):
            for sample, drafts_RK in zip(batch, self.drafts(batch), strict=True):
                ids_N = sample.ids_N.numpy()
                steps = walk(ids_N, sample.n_context, drafts_RK)
                counts = counts_of(
                    steps,
                    sample_id=sample.sample_id,
                    prompt_id=sample.sample_id.rpartition("-")[0] or sample.sample_id,
                    ids_N=ids_N,
                    n_context=sample.n_context,
                    draft_steps=self.steps,
                    tags=(tags or {}).get(sample.sample_id),
                )
                yield Replayed(sample, steps, counts, drafts_RK)

    @torch.inference_mode()
    def drafts(self, samples: Sequence[Sample], *, prune: bool = True) -> list[NDArray[np.int64]]:
        """Per sample int64 [R-1, K]: target ids drafted at rows P-1 .. N-3.

        NOT_DRAFTED where `prune` left out what no walk reaches. Raises MeasurementError.
        """
        for sample in samples:
            self._check(sample)
        lengths = [max(len(s.ids_N) - 2, 0) for s in samples]
        queries = [max(len(s.ids_N) - 1 - s.n_context, 0) for s in samples]
        table_AK = torch.full((sum(queries), self.steps), NOT_DRAFTED, dtype=torch.long)
        if sum(queries):
            record_AK = _record(samples, queries, self.steps)
            self._fill(samples, lengths, queries, record_AK if prune else None, table_AK)
        return [part.numpy() for part in torch.split(table_AK, queries)]

    def _fill(
        self,
        samples: Sequence[Sample],
        lengths: list[int],
        queries: list[int],
        record_AK: Tensor | None,
        table_AK: Tensor,
    ) -> None:
        past, rows = self._depth_0(samples, lengths, queries)
        for depth in range(self.steps):
            if depth:
                self._deeper(past, rows, depth)
            drafted_A = self._drafted(rows.h_AH)
            if self._drafter.config.norm_output:
                rows.h_AH = self._drafter.norm(rows.h_AH)
            rows.tokens_A = drafted_A
            table_AK[rows.out_A.cpu(), depth] = drafted_A.cpu()
            if record_AK is not None:
                alive_A = drafted_A.cpu() == record_AK[rows.out_A.cpu(), depth]
                rows = rows.kept(alive_A.to(self.device))
            if not len(rows.out_A):
                return

    def _depth_0(
        self, samples: Sequence[Sample], lengths: list[int], queries: list[int]
    ) -> tuple[list[KeysValues], _Rows]:
        """Keys and values of every row, by sample; the state of the query rows after depth 0."""
        drafter, layer = self._drafter, self._drafter.midlayer
        pairs = list(zip(samples, lengths, strict=True))
        features_MW = torch.cat([s.features_NW[:n] for s, n in pairs]).to(self.device, self.dtype)
        tokens_M = torch.cat([s.ids_N[1 : n + 1] for s, n in pairs]).to(self.device)
        positions_M = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        h_MH = drafter.project(features_MW)
        x_M2H = layer.joined(F.embedding(tokens_M, self._embed_VH), h_MH)
        angles = drafter.angles(positions_M)
        k_MJD, v_MJD = layer.self_attn.keys_values(x_M2H, angles)
        past = list(zip(torch.split(k_MJD, lengths), torch.split(v_MJD, lengths), strict=True))
        starts = np.cumsum([0, *lengths])
        where_A = torch.cat(
            [torch.arange(int(e) - q, int(e)) for e, q in zip(starts[1:], queries, strict=True)]
        ).to(self.device)
        rows = _Rows(
            sample_A=torch.arange(len(samples)).repeat_interleave(torch.tensor(queries)),
            row_A=positions_M[where_A],
            out_A=torch.arange(len(where_A), device=self.device),
            h_AH=h_MH[where_A],
            tokens_A=tokens_M[where_A],
        )
        rows.sample_A = rows.sample_A.to(self.device)
        q_AQD = layer.self_attn.queries(x_M2H[where_A], (angles[0][where_A], angles[1][where_A]))
        attended_AQD, _ = self._attend(q_AQD, past, rows)
        rows.h_AH = layer.finished(rows.h_AH, attended_AQD)
        return past, rows

    def _deeper(self, past: list[KeysValues], rows: _Rows, depth: int) -> None:
        """One drafter step of every row: its own last token and feature, at position t + depth."""
        layer = self._drafter.midlayer
        angles = self._drafter.angles(rows.row_A + depth)
        x_A2H = layer.joined(F.embedding(rows.tokens_A, self._embed_VH), rows.h_AH)
        q_AQD = layer.self_attn.queries(x_A2H, angles)
        rows.own.append(layer.self_attn.keys_values(x_A2H, angles))
        past_AQD, lse_AQ = self._attend(q_AQD, past, rows)
        rows.h_AH = layer.finished(rows.h_AH, merged(q_AQD, past_AQD, lse_AQ, rows.own))

    def _attend(self, q_AQD: Tensor, past: list[KeysValues], rows: _Rows) -> tuple[Tensor, Tensor]:
        """Each row over depth-0 rows 0..t of its own sample: attended, and log-sum-exp [A, Q].

        Rows of one sample stand together, in order, so a sample's part is a slice.
        """
        outs, sums = [], []
        counts = torch.bincount(rows.sample_A, minlength=len(past)).tolist()
        row_parts = torch.split(rows.row_A, counts)
        for q, t, (k, v) in zip(torch.split(q_AQD, counts), row_parts, past, strict=True):
            block = max(1, SCORES_AT_ONCE // max(q.shape[1] * len(k), 1))
            for start in range(0, len(q), block):
                end = min(start + block, len(q))
                out, lse = _causal(q[start:end], k, v, t[start:end])
                outs.append(out)
                sums.append(lse)
        return torch.cat(outs), torch.cat(sums)

    def _drafted(self, h_AH: Tensor) -> Tensor:
        """argmax over the draft vocabulary (lowest index on ties), as target ids."""
        size = max(1, LOGITS_AT_ONCE // self._drafter.config.draft_vocab_size)
        normed = torch.split(self._drafter.norm(h_AH), size)
        best = [self._drafter.lm_head(h).argmax(-1) for h in normed]
        return self._drafter.target_ids(torch.cat(best))

    def _batches(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        batch: list[Sample] = []
        rows = 0
        for sample in samples:
            if batch and rows + len(sample.ids_N) > self._rows_per_batch:
                yield batch
                batch, rows = [], 0
            batch.append(sample)
            rows += len(sample.ids_N)
        if batch:
            yield batch

    def _check(self, sample: Sample) -> None:
        n, width = len(sample.ids_N), self._drafter.config.width
        found = sample.features_NW.shape
        if sample.n_context < 1 or sample.n_context >= n:
            raise MeasurementError(
                f"context {sample.n_context} of {n} tokens leaves no response after a context",
                where=sample.sample_id,
            )
        if found[0] < n - 2:
            raise MeasurementError(
                f"boundaries of {found[0]} tokens are stored, replay needs those of the whole sample "
                f"({n - 2}), the context included",
                where=sample.sample_id,
                fix="collect with the states of the context",
            )
        if found[1] != width:
            raise MeasurementError(
                f"states are {found[1]} wide, the drafter reads {width}",
                where=sample.sample_id,
                fix="capture the boundaries the drafter was made for; a third of the width means the "
                "server ran with --speculative-algorithm EAGLE instead of EAGLE3",
            )
        top = int(sample.ids_N.max())
        if top >= len(self._embed_VH):
            raise MeasurementError(
                f"token {top} lies outside the vocabulary of {len(self._embed_VH)}",
                where=sample.sample_id,
                fix="use the drafter of this target",
            )


def _record(samples: Sequence[Sample], queries: list[int], steps: int) -> Tensor:
    """int64 [A, K]: the token that each draft of each query row is compared with, or NOT_DRAFTED - 1."""
    parts = []
    for sample, n_rows in zip(samples, queries, strict=True):
        where = sample.n_context + 1 + torch.arange(n_rows)[:, None] + torch.arange(steps)
        n = len(sample.ids_N)
        parts.append(torch.where(where < n, sample.ids_N[where.clamp(max=n - 1)], NOT_DRAFTED - 1))
    return torch.cat(parts)


def _causal(q_AQD: Tensor, k_TJD: Tensor, v_TJD: Tensor, t_A: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `t_A` over rows 0..t: attended [A, Q, D], and log-sum-exp float32 [A, Q]."""
    n_q, heads, size = q_AQD.shape
    shared = k_TJD.shape[1]
    q_JBD = q_AQD.view(n_q, shared, -1, size).permute(1, 2, 0, 3).reshape(shared, -1, size)
    wide = torch.promote_types(q_AQD.dtype, torch.float32)
    scores = (q_JBD @ k_TJD.permute(1, 2, 0)).to(wide) / math.sqrt(size)
    ahead = torch.arange(len(k_TJD), device=t_A.device) > t_A[:, None]
    scores = scores.view(shared, -1, n_q, len(k_TJD)).masked_fill(ahead, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse[..., None]).exp().to(v_TJD.dtype).view(shared, -1, len(k_TJD))
    out = (weights @ v_TJD.transpose(0, 1)).view(shared, -1, n_q, size)
    return (
        out.permute(2, 0, 1, 3).reshape(n_q, heads, size),
        lse.permute(2, 0, 1).reshape(n_q, heads),
    )


def as_ids(ids: Sequence[int]) -> Tensor:
    """Token ids as a sample holds them."""
    return torch.tensor(ids, dtype=torch.long)


def find_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises MeasurementError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError as e:
        raise MeasurementError(f"no device '{name}'", fix="use auto, cpu or cuda") from e
    if found.type == "cuda" and not torch.cuda.is_available():
        raise MeasurementError("CUDA is not available here", fix="use --device cpu")
    return found


def compute_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16. Raises MeasurementError."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise MeasurementError(f"unknown dtype '{name}'", fix=f"use {' or '.join(dtypes)}")
    return dtypes[name]
