"""The EAGLE-3 drafter, under SGLang's names, and its training-time-test unroll.

    h = fc(boundaries)                                   every row, once
    depth 0: h = midlayer(embed(x[t+1]), h)              causal over the sample's rows
    depth k: h = midlayer(embed(next token), h)          rows 0..t at depth 0, and its own of 1..k
    logits = lm_head(norm(h))

Only depth 0 of other rows is ever attended to, as in the engine, which overwrites what drafting left
in the cache. So rows that are no queries (the context) need keys and values at depth 0 and nothing
else: no query, no MLP, no deeper step.

Weights are float32 masters, cast to the features' dtype where they are used. Shape suffixes as in
rows.py; Q query heads, J key heads, D head size, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from datagen.drafter.attention import Attention, fused, merged
from datagen.drafter.config import DrafterConfig
from datagen.drafter.rope import cos_sin, rotated
from datagen.drafter.rows import Batch

KeysValues = tuple[Tensor, Tensor]


class Casts:
    """Weights in the dtype of a pass: while `open`, each is cast once, and joined with its neighbours.

    An unroll uses every weight at every depth. Cast there, the passes over the masters and over their
    gradients cost a third of the arithmetic at Kimi's size; small drafters wait for their launches.
    """

    def __init__(self) -> None:
        self.fuse = False
        """Compile what is a chain of small kernels."""
        self._kept: dict[tuple[int, ...], Tensor] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Within: casts are kept. The weights must not change meanwhile."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled where that is wanted."""
        return fused(function) if self.fuse else function

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`."""
        return self._held((id(weight),), lambda: weight.to(dtype))

    def products(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """x with each of the weights; in one product while open, where joining them pays."""
        parts = [self.cast(w, x.dtype) for w in weights]
        if self._kept is None:
            return [F.linear(x, w) for w in parts]
        joined = self._held(tuple(map(id, weights)), lambda: torch.cat(parts))
        return torch.split(F.linear(x, joined), [len(w) for w in weights], dim=-1)

    def _held(self, key: tuple[int, ...], made: Callable[[], Tensor]) -> Tensor:
        if self._kept is None:
            return made()
        if key not in self._kept:
            self._kept[key] = made()
        return self._kept[key]


class Linear(nn.Linear):
    """Without bias; computes in the input's dtype."""

    def __init__(self, inputs: int, outputs: int, casts: Casts) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.casts = casts

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.linear(input, self.casts.cast(self.weight, input.dtype))


class RMSNorm(nn.Module):
    """Normalised in float32, then multiplied by the weight, as SGLang's kernel does."""

    def __init__(self, size: int, eps: float, casts: Casts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.casts = eps, casts

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.casts.cast(self.weight, x.dtype), self.eps)


class SelfAttention(nn.Module):
    """Projections only: what is attended to differs by depth, and is the unroll's business."""

    def __init__(self, c: DrafterConfig, casts: Casts) -> None:
        super().__init__()
        self.c, self.casts = c, casts
        self.q_proj = Linear(2 * c.hidden_size, c.num_heads * c.head_dim, casts)
        self.k_proj = Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, casts)
        self.v_proj = Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, casts)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size, casts)

    def queries(self, x_A2H: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_proj(x_A2H).view(len(x_A2H), -1, self.c.head_dim)
        return self._turned(q, angles)

    def keys_values(self, x_N2H: Tensor, angles: tuple[Tensor, Tensor]) -> KeysValues:
        shape = (len(x_N2H), self.c.num_kv_heads, self.c.head_dim)
        k, v = self.casts.products(x_N2H, [self.k_proj.weight, self.v_proj.weight])
        return self._turned(k.view(shape), angles), v.view(shape)

    def all_three(
        self, x_A2H: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same rows."""
        weights = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        q, k, v = (
            p.view(len(x_A2H), -1, self.c.head_dim) for p in self.casts.products(x_A2H, weights)
        )
        return self._turned(q, angles), self._turned(k, angles), v

    def _turned(self, x_NKD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.casts.fused(rotated)(x_NKD, *angles)
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DrafterConfig, casts: Casts) -> None:
        super().__init__()
        self.casts = casts
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, casts)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, casts)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, casts)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.casts.products(x, [self.gate_proj.weight, self.up_proj.weight])
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class MidLayer(nn.Module):
    """One decoder layer whose attention reads [norm(embedding), norm(h)]."""

    def __init__(self, c: DrafterConfig, casts: Casts) -> None:
        super().__init__()
        self.self_attn = SelfAttention(c, casts)
        self.mlp = MLP(c, casts)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, casts)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, casts)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, casts)

    def joined(self, embedding_NH: Tensor, h_NH: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedding_NH), self.hidden_norm(h_NH)], dim=-1)

    def finished(self, h_AH: Tensor, attended_AQD: Tensor) -> Tensor:
        h_AH = h_AH + self.self_attn.o_proj(attended_AQD.flatten(1).to(h_AH.dtype))
        out: Tensor = h_AH + self.mlp(self.post_attention_layernorm(h_AH))
        return out


class Drafter(nn.Module):
    """Parameters by SGLang's names, and the two vocabulary maps; the embedding is the target's."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.casts = casts = Casts()
        self.fc = Linear(config.width, config.hidden_size, casts)
        self.midlayer = MidLayer(config, casts)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, casts)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, casts)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.width, config.rms_norm_eps, casts)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._table = config.rope.table(config.head_dim)
        self.recompute = False
        """Recompute deeper activations in the backward pass instead of keeping them."""

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights of a fresh drafter: normal, 0.02; norms one. The maps are left."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.copy_(drawn)

    def project(self, features_MW: Tensor) -> Tensor:
        """fc over the boundaries, normed first where the config says so."""
        if self.config.norm_before_fc:
            features_MW = self.input_norm(features_MW)
        out: Tensor = self.fc(features_MW)
        return out

    def angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin of positions."""
        frequency, size = self._table
        if (
            frequency.device != positions_N.device
        ):  # moved once: a copy at every depth is waited for
            self._table = frequency, size = frequency.to(positions_N.device), size
        return cos_sin(self._table, positions_N)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids as target ids."""
        return draft_ids + self.d2t[draft_ids]


class Unroll:
    """One batch, depth by depth. `first()` is depth 0; each `next(tokens_A)` is one deeper."""

    def __init__(
        self, drafter: Drafter, batch: Batch, embed_VH: Tensor, attention: Attention
    ) -> None:
        self._drafter, self._batch, self._embed_VH = drafter, batch, embed_VH
        self._attention = attention
        self._cached: list[KeysValues] = []
        self._h_AH: Tensor | None = None

    def first(self) -> Tensor:
        """h of depth 0, [A, H], before the norm."""
        drafter, batch, layer = self._drafter, self._batch, self._drafter.midlayer
        h_MH = drafter.project(batch.features_MW)
        x_M2H = layer.joined(self._embedded(batch.tokens_M, h_MH), h_MH)
        angles = drafter.angles(batch.positions_M)
        k_MJD, v_MJD = layer.self_attn.keys_values(x_M2H, angles)
        rows_A = batch.active_A
        own_angles = angles[0][rows_A], angles[1][rows_A]
        # index_select: the gradient of x[rows] sorts the rows first.
        q_AQD = layer.self_attn.queries(x_M2H.index_select(0, rows_A), own_angles)
        attended_AQD, _ = self._attention(q_AQD, k_MJD, v_MJD)
        self._cached = [(k_MJD, v_MJD)]
        return self._keep(layer.finished(h_MH.index_select(0, rows_A), attended_AQD))

    def next(self, tokens_A: Tensor) -> Tensor:
        """h of the next depth, [A, H], each row fed `tokens_A`: recorded ones, or its own drafts."""
        assert self._h_AH is not None, "first() comes first"
        step = self._step
        h_AH = self._h_AH
        embedding_AH = self._embedded(tokens_A, h_AH)
        positions_A = self._batch.positions_M[self._batch.active_A] + len(self._cached)
        flat = [t for pair in self._cached for t in pair]
        if self._drafter.recompute and torch.is_grad_enabled():
            out, k, v = checkpoint(
                step, h_AH, embedding_AH, positions_A, *flat, use_reentrant=False
            )
        else:
            out, k, v = step(h_AH, embedding_AH, positions_A, *flat)
        self._cached.append((k, v))
        return self._keep(out)

    def _step(
        self, h_AH: Tensor, embedding_AH: Tensor, positions_A: Tensor, *flat: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        layer = self._drafter.midlayer
        angles = self._drafter.angles(positions_A)
        q_AQD, k_AJD, v_AJD = layer.self_attn.all_three(layer.joined(embedding_AH, h_AH), angles)
        past_AQD, lse_AQ = self._attention(q_AQD, flat[0], flat[1])
        own = [(flat[i], flat[i + 1]) for i in range(2, len(flat), 2)] + [(k_AJD, v_AJD)]
        attended_AQD = self._drafter.casts.fused(merged)(q_AQD, past_AQD, lse_AQ, own)
        return layer.finished(h_AH, attended_AQD), k_AJD, v_AJD

    def _embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        return F.embedding(tokens, self._embed_VH).to(like.dtype)

    def _keep(self, h_AH: Tensor) -> Tensor:
        """The feature of the next depth is the residual stream, or its norm where the config says so."""
        self._h_AH = self._drafter.norm(h_AH) if self._drafter.config.norm_output else h_AH
        return h_AH


def unrolled(
    drafter: Drafter, batch: Batch, embed_VH: Tensor, attention: Attention, depths: int
) -> Tensor:
    """Teacher-forced training-time test: h before the norm, [A, K, H]."""
    # Recomputing casts again, after this has returned: what was kept would not be the same then.
    with contextlib.nullcontext() if drafter.recompute else drafter.casts.open():
        unroll = Unroll(drafter, batch, embed_VH, attention)
        out = [unroll.first()]
        out += [unroll.next(batch.tokens_AK[:, k]) for k in range(1, depths)]
    return torch.stack(out, dim=1)
