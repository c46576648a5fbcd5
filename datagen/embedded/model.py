"""A Llama forward pass for CPUs, with the stream entering any layer laid open.

Shape suffixes: N tokens of several sequences packed, B sequences, T tokens of one, H hidden,
V vocabulary, K heads, G query heads per key head, D head dimension, L cached tokens.

Weights are kept in float32, transposed to [in, out]: that layout makes small batches several times
faster on CPUs, and CPUs without bf16 units multiply float32 three times faster. `bfloat16` is a
matter of rounding: activations are rounded where a bf16 engine rounds them, products accumulate in
float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from torch import Tensor

from datagen.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Dimensions of a Llama-class model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_ids: tuple[int, ...]
    model_type: str
    architecture: str

    @classmethod
    def read(cls, directory: Path) -> LlamaConfig:
        """From a checkpoint's config.json; raises ConfigError for what this forward cannot run."""
        path = directory / "config.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
            if raw["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
                raise ConfigError(
                    f"model_type {raw['model_type']} with rope {rope or 'default'} is not supported",
                    where=path,
                    fix="serve it with SGLang",
                )
            eos = raw.get("eos_token_id")
            heads = int(raw["num_attention_heads"])
            return cls(
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(raw["num_key_value_heads"]),
                head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
                vocab_size=int(raw["vocab_size"]),
                context_length=int(raw["max_position_embeddings"]),
                rms_norm_eps=float(raw["rms_norm_eps"]),
                rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),
                eos_token_ids=tuple(eos)
                if isinstance(eos, list)
                else ()
                if eos is None
                else (eos,),
                model_type=str(raw["model_type"]),
                architecture=str((raw.get("architectures") or ["LlamaForCausalLM"])[0]),
            )
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"no Llama checkpoint: {e!r}", where=path) from e


class KVCache:
    """Keys and values of the running sequences: float32 [layers, slots, K, capacity, D].

    Slots 0..n-1 are in use, without holes; capacity grows in steps with the longest sequence.
    """

    STEP = 256

    def __init__(self, config: LlamaConfig, slots: int) -> None:
        self._config, self._slots = config, slots
        self.capacity = 0
        self.lengths: list[int] = []
        self.keys = self.values = torch.empty(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of `tokens`; an empty cache shrinks to it."""
        wanted = -(-tokens // self.STEP) * self.STEP
        if wanted <= self.capacity and (self.lengths or wanted * 4 > self.capacity):
            return
        c, used = self._config, len(self.lengths)
        shape = (c.num_layers, self._slots, c.num_kv_heads, wanted, c.head_dim)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        if used:
            longest = max(self.lengths)
            keys[:, :used, :, :longest] = self.keys[:, :used, :, :longest]
            values[:, :used, :, :longest] = self.values[:, :used, :, :longest]
        self.keys, self.values, self.capacity = keys, values, wanted

    def add(self, length: int) -> int:
        """A slot for a sequence of `length` tokens about to be written."""
        self.reserve(length + 1)
        self.lengths.append(length)
        return len(self.lengths) - 1

    @torch.inference_mode()  # the cache may have grown in a forward pass, so in that mode
    def remove(self, slot: int) -> None:
        """Free a slot; the last sequence moves into the hole."""
        last = len(self.lengths) - 1
        if slot != last:
            n = self.lengths[last]
            self.keys[:, slot, :, :n] = self.keys[:, last, :, :n]
            self.values[:, slot, :, :n] = self.values[:, last, :, :n]
            self.lengths[slot] = self.lengths[last]
        self.lengths.pop()


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

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """lm_head over post-norm states: float32 [B, V]."""
        return hidden_BH.float() @ self._head_HV

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        cache: KVCache | None = None,
        slots: Sequence[int] = (),
        boundaries: Sequence[int] | None = None,
    ) -> Prefilled:
        """Read whole sequences, packed; fill `slots` of `cache` when given."""
        lengths = [len(s) for s in sequences]
        positions_N = torch.cat([torch.arange(n) for n in lengths])
        x_NH = self._embed_VH[torch.tensor([i for s in sequences for i in s])]
        cos_N1D, sin_N1D = self._rope(positions_N)
        kept: list[Tensor] = []
        for number in range(self.config.num_layers):
            if boundaries is not None and number in boundaries:
                kept.append(x_NH)
            q_NKD, k_NKD, v_NKD = self._qkv(number, x_NH, cos_N1D, sin_N1D)
            outs, start = [], 0
            for i, n in enumerate(lengths):
                q, k, v = (t[start : start + n].transpose(0, 1) for t in (q_NKD, k_NKD, v_NKD))
                if cache is not None:
                    cache.keys[number, slots[i], :, :n] = k
                    cache.values[number, slots[i], :, :n] = v
                outs.append(self._causal(q, k, v))
                start += n
            x_NH = self._rest(number, x_NH, torch.cat(outs))
        final_NH = self._rms(x_NH, self._norm_H)
        ends = torch.tensor(lengths).cumsum(0) - 1
        rows_NW = None if boundaries is None else torch.cat([*kept, final_NH], dim=-1)
        return Prefilled(final_NH[ends], rows_NW)

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], cache: KVCache, *, pad_to: int = 0) -> Tensor:
        """One token for every running sequence: float32 logits [B, V]; the cache grows by one.

        With `pad_to` (a fixed batch) every product has the same shapes whoever else is running,
        and attention is done sequence by sequence: a sequence's logits then do not depend on its
        neighbours, bit for bit.
        """
        n = len(tokens)
        cache.reserve(max(cache.lengths) + 1)
        lengths = torch.tensor(cache.lengths)
        rows = max(n, pad_to)
        ids_B, positions_B = (
            torch.zeros(rows, dtype=torch.long),
            torch.zeros(rows, dtype=torch.long),
        )
        ids_B[:n], positions_B[:n] = torch.tensor(tokens), lengths
        x_BH = self._embed_VH[ids_B]
        cos_B1D, sin_B1D = self._rope(positions_B)
        slots, longest = torch.arange(n), max(cache.lengths) + 1
        mask_B11L = torch.where(torch.arange(longest) <= lengths[:, None], 0.0, float("-inf"))[
            :, None, None
        ]
        for number in range(self.config.num_layers):
            q_BKD, k_BKD, v_BKD = self._qkv(number, x_BH, cos_B1D, sin_B1D)
            keys, values = cache.keys[number], cache.values[number]
            keys[slots, :, lengths] = k_BKD[:n].float()
            values[slots, :, lengths] = v_BKD[:n].float()
            groups = self.config.num_heads // self.config.num_kv_heads
            q_BKGD = q_BKD[:n].float().view(n, -1, groups, self.config.head_dim)
            if pad_to:
                out_BKGD = torch.zeros(rows, *q_BKGD.shape[1:])
                for i, length in enumerate(cache.lengths):
                    out_BKGD[i] = F.scaled_dot_product_attention(
                        q_BKGD[i : i + 1],
                        keys[i : i + 1, :, : length + 1],
                        values[i : i + 1, :, : length + 1],
                    )[0]
            else:
                out_BKGD = F.scaled_dot_product_attention(
                    q_BKGD, keys[:n, :, :longest], values[:n, :, :longest], attn_mask=mask_B11L
                )
            x_BH = self._rest(number, x_BH, out_BKGD.reshape(rows, -1).to(self.dtype))
        cache.lengths = [length + 1 for length in cache.lengths]
        return self.logits(self._rms(x_BH, self._norm_H))[:n]

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        norm_H, qkv_HO = self._layers[number][:2]
        both = self._linear(self._rms(x_NH, norm_H), qkv_HO).view(len(x_NH), -1, c.head_dim)
        rotated = both[:, : c.num_heads + c.num_kv_heads]
        low, high = rotated.chunk(2, dim=-1)
        turned = rotated * cos_N1D + torch.cat([-high, low], dim=-1) * sin_N1D
        return (
            turned[:, : c.num_heads],
            turned[:, c.num_heads :],
            both[:, c.num_heads + c.num_kv_heads :],
        )

    def _causal(self, q_KTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
        groups = self.config.num_heads // self.config.num_kv_heads
        q, k, v = (
            q_KTD.float(),
            k_KTD.float().repeat_interleave(groups, 0),
            v_KTD.float().repeat_interleave(groups, 0),
        )
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return out.transpose(0, 1).reshape(q.shape[1], -1).to(self.dtype)

    def _rest(self, number: int, x_NH: Tensor, attention_NH: Tensor) -> Tensor:
        o_HO, norm_H, gate_up_HO, down_HO = self._layers[number][2:]
        x_NH = x_NH + self._linear(attention_NH, o_HO)
        gate, up = self._linear(self._rms(x_NH, norm_H), gate_up_HO).chunk(2, dim=-1)
        return x_NH + self._linear(F.silu(gate) * up, down_HO)
