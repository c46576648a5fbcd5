"""A Llama forward pass for CPUs, with the stream entering any layer laid open.

Shape suffixes: N tokens of several sequences packed, B sequences, T tokens of one, H hidden,
V vocabulary, K heads, G query heads per key head, D head dimension, L cached tokens.

Weights are kept in float32, transposed to [in, out]: that layout makes small batches several times
faster on CPUs, and CPUs without bf16 units multiply float32 three times faster. `bfloat16` is a
matter of rounding: activations are rounded where a bf16 engine rounds them, products accumulate in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from torch import Tensor

from datagen.embedded.cache import SequenceCache
from datagen.embedded.config import LlamaConfig
from datagen.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`last_BH`: post-norm state of each sequence's last token. `rows_NW`: boundaries, then the
    post-norm final state, of every token in the model's dtype; None unless asked for."""

    last_BH: Tensor
    rows_NW: Tensor | None


class Llama:
    """Weights and forward passes. Deterministic in float32: see `decode`."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor], dtype: str) -> None:
        self.config, self.dtype = config, DTYPES[dtype]

        def w(name: str) -> Tensor:
            return weights[name + ".weight"].to(self.dtype)

        def transposed(*names: str) -> Tensor:
            return torch.cat([w(n).float() for n in names]).t().contiguous()

        self._embed_VH = w("model.embed_tokens")
        head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
        self._head_HV = transposed(head)
        self._norm_H = w("model.norm")
        self._layers = []
        for i in range(config.num_layers):
            p, a, m = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            self._layers.append(
                (
                    w(f"{p}.input_layernorm"),
                    transposed(f"{a}.q_proj", f"{a}.k_proj", f"{a}.v_proj"),
                    transposed(f"{a}.o_proj"),
                    w(f"{p}.post_attention_layernorm"),
                    transposed(f"{m}.gate_proj", f"{m}.up_proj"),
                    transposed(f"{m}.down_proj"),
                )
            )
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(
            torch.arange(config.context_length, dtype=torch.float32), config.rope_theta**-half
        )
        both = torch.cat([angles, angles], dim=-1)
        self._cos_TD, self._sin_TD = both.cos().to(self.dtype), both.sin().to(self.dtype)

    @classmethod
    def load(cls, directory: Path, dtype: str) -> Llama:
        """From a safetensors checkpoint directory; raises ConfigError."""
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype '{dtype}'", fix="use bfloat16 or float32")
        config = LlamaConfig.read(directory)
        try:
            with safe_open(str(directory / "model.safetensors"), framework="pt") as f:
                weights = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
            return cls(config, weights, dtype)
        except (OSError, KeyError) as e:
            raise ConfigError(f"no weights can be loaded: {e!r}", where=directory) from e

    @property
    def embedding(self) -> Tensor:
        """[V, H] in the model's dtype."""
        return self._embed_VH

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """lm_head over post-norm states: float32 [B, V]."""
        return hidden_BH.float() @ self._head_HV

    @torch.inference_mode()
    def prefill(
        self,
        pieces: Sequence[Sequence[int]],
        *,
        caches: Sequence[SequenceCache | None] | None = None,
        boundaries: Sequence[int] | None = None,
    ) -> Prefilled:
        """Read the next tokens of several sequences, packed: one product serves them all.

        A piece goes on after what its cache holds, and is added to it; without a cache it is a
        whole sequence of which nothing is kept.
        """
        kept_caches = list(caches) if caches is not None else [None] * len(pieces)
        lengths = [len(p) for p in pieces]
        starts = [0 if c is None else c.length for c in kept_caches]
        for cache, start, n in zip(kept_caches, starts, lengths, strict=True):
            if cache is not None:
                cache.reserve(start + n)
        positions_N = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        )
        x_NH = self._embed_VH[torch.tensor([i for p in pieces for i in p])]
        cos_N1D, sin_N1D = self._rope(positions_N)
        kept: list[Tensor] = []
        for number in range(self.config.num_layers):
            if boundaries is not None and number in boundaries:
                kept.append(x_NH)
            q_NKD, kv_NKD = self._qkv(number, x_NH, cos_N1D, sin_N1D)
            outs_ND = []
            for q_TKD, kv_TKD, cache in zip(
                torch.split(q_NKD, lengths), torch.split(kv_NKD, lengths), kept_caches, strict=True
            ):
                kv_KLD = kv_TKD.transpose(0, 1).float()
                if cache is not None:
                    end = cache.length + kv_KLD.shape[1]
                    cache.layer(number)[:, cache.length : end] = kv_KLD
                    if cache.length:
                        kv_KLD = cache.layer(number)[:, :end]
                outs_ND.append(self._causal(q_TKD, kv_KLD))
            x_NH = self._rest(number, x_NH, torch.cat(outs_ND))
        for cache, n in zip(kept_caches, lengths, strict=True):
            if cache is not None:
                cache.length += n
        final_NH = self._rms(x_NH, self._norm_H)
        ends = torch.tensor(lengths).cumsum(0) - 1
        last_NH = self.final_of_rows(x_NH, final_NH)
        rows_NW = None if boundaries is None else torch.cat([*kept, last_NH], dim=-1)
        return Prefilled(final_NH[ends], rows_NW)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], caches: Sequence[SequenceCache], *, pad_to: int = 0
    ) -> Tensor:
        """One token for every running sequence: float32 logits [B, V]; each cache grows by one.

        Attention is done sequence by sequence. With `pad_to` (a fixed batch) every other product
        has the same shape whoever is running, so that in float32 a sequence's logits do not depend
        on its neighbours, bit for bit.
        """
        n = len(tokens)
        for cache in caches:
            cache.reserve(cache.length + 1)
        rows = max(n, pad_to)
        ids_B = torch.zeros(rows, dtype=torch.long)
        positions_B = torch.zeros(rows, dtype=torch.long)
        ids_B[:n] = torch.tensor(tokens)
        positions_B[:n] = torch.tensor([c.length for c in caches])
        x_BH = self._embed_VH[ids_B]
        cos_B1D, sin_B1D = self._rope(positions_B)
        slots = [c.next_slots() for c in caches]
        held = [c.views(c.length + 1) for c in caches]
        kv_heads, width = self.config.num_kv_heads, self.config.num_heads * self.config.head_dim
        out_B1KGD = torch.zeros(rows, 1, kv_heads, width // kv_heads // self.config.head_dim,
                                self.config.head_dim)  # fmt: skip
        outs_1KGD = out_B1KGD.unbind(0)
        for number in range(self.config.num_layers):
            q_BKD, kv_BKD = self._qkv(number, x_BH, cos_B1D, sin_B1D)
            q_B1KGD = q_BKD.float().view(out_B1KGD.shape)
            for i, (q_1KGD, kv_KD) in enumerate(
                zip(q_B1KGD[:n].unbind(0), kv_BKD[:n].unbind(0), strict=True)
            ):
                slots[i][number].copy_(kv_KD)
                keys, values = held[i]
                outs_1KGD[i].copy_(
                    F.scaled_dot_product_attention(q_1KGD, keys[number], values[number])
                )
            x_BH = self._rest(number, x_BH, out_B1KGD.view(rows, width).to(self.dtype))
        for cache in caches:
            cache.length += 1
        return self.logits(self._rms(x_BH, self._norm_H))[:n]

    def final_of_rows(self, stream_NH: Tensor, final_NH: Tensor) -> Tensor:  # noqa: ARG002
        """The final state of captured rows, [N, H]: after the final norm."""
        return final_NH

    # -- inside --------------------------------------------------------------------------------

    def _rope(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos_TD[positions_N][:, None], self._sin_TD[positions_N][:, None]

    def _linear(self, x: Tensor, w_IO: Tensor) -> Tensor:
        return (x.float() @ w_IO).to(self.dtype)

    def _rms(self, x_NH: Tensor, weight_H: Tensor) -> Tensor:
        x = x_NH.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (x * scale).to(self.dtype) * weight_H

    def _qkv(
        self, number: int, x_NH: Tensor, cos_N1D: Tensor, sin_N1D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries [N, K*G, D]; rotated keys, then values [N, 2K, D]."""
        c = self.config
        norm_H, qkv_HO = self._layers[number][:2]
        both = self._linear(self._rms(x_NH, norm_H), qkv_HO).view(len(x_NH), -1, c.head_dim)
        rotated = both[:, : c.num_heads + c.num_kv_heads]
        low, high = rotated.chunk(2, dim=-1)
        turned = rotated * cos_N1D + torch.cat([-high, low], dim=-1) * sin_N1D
        rotated.copy_(turned)
        return both[:, : c.num_heads], both[:, c.num_heads :]

    def _causal(self, q_TKD: Tensor, kv_KLD: Tensor) -> Tensor:
        """Attention of the last T of L tokens: [T, K*G*D]. `kv_KLD`: keys, then values."""
        groups = self.config.num_heads // self.config.num_kv_heads
        q_KTD = q_TKD.transpose(0, 1).float()
        keys, values = (t.repeat_interleave(groups, 0) for t in kv_KLD.chunk(2))
        n, past = q_KTD.shape[1], kv_KLD.shape[1] - q_KTD.shape[1]
        mask_TL = None
        if past:
            mask_TL = torch.full((n, past + n), float("-inf")).triu_(past + 1)
        out_KTD = F.scaled_dot_product_attention(
            q_KTD[None], keys[None], values[None], attn_mask=mask_TL, is_causal=not past
        )[0]
        return out_KTD.transpose(0, 1).reshape(n, -1).to(self.dtype)

    def _rest(self, number: int, x_NH: Tensor, attention_NH: Tensor) -> Tensor:
        o_HO, norm_H, gate_up_HO, down_HO = self._layers[number][2:]
        x_NH = x_NH + self._linear(attention_NH, o_HO)
        gate, up = self._linear(self._rms(x_NH, norm_H), gate_up_HO).chunk(2, dim=-1)
        return x_NH + self._linear(F.silu(gate) * up, down_HO)
