"""The target's own weights that training needs: embedding, lm_head, final norm. Nothing else is read.

Read selectively from a checkpoint directory's safetensors, under Llama's names or nested ones
(Kimi-K2.5: `language_model.*`). What the target does to its logits (scale, soft cap) is done here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError, safe_open
from torch import Tensor

from datagen.errors import ConfigError

PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
HEADS = ("lm_head", "language_model.lm_head", "model.language_model.lm_head", "model.lm_head")
VOCAB_CHUNK = 16_384
LOGITS_AT_ONCE = 1 << 28
DRAWN_AT_ONCE = 1 << 24  # logits
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = cap * tanh(scale * x / cap); cap 0 is none."""

    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, raw: Tensor) -> Tensor:
        """float32 logits as the target gives them."""
        logits = raw.float() * self.scale if self.scale != 1.0 else raw.float()
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


@dataclass(frozen=True, slots=True)
class Target:
    """`embed_VH`, `head_VH` in the checkpoint's dtype; `model_type` of the text model."""

    embed_VH: Tensor
    head_VH: Tensor
    norm_H: Tensor
    norm_eps: float
    rule: LogitRule
    model_type: str
    context_length: int
    config: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Rows of lm_head."""
        return int(self.head_VH.shape[0])

    def to(self, device: torch.device, dtype: torch.dtype) -> Target:
        """On `device`, in `dtype`; a tied head stays one tensor."""
        embed = self.embed_VH.to(device, dtype)
        tied = self.head_VH is self.embed_VH
        head = embed if tied else self.head_VH.to(device, dtype)
        return Target(
            embed, head, self.norm_H.to(device), self.norm_eps, self.rule, self.model_type,
            self.context_length, self.config,
        )  # fmt: skip

    def head_on(self, device: torch.device) -> Target:
        """Final norm and lm_head on `device`, as they are; the embedding where it was."""
        return replace(self, head_VH=self.head_VH.to(device), norm_H=self.norm_H.to(device))

    def post_norm(self, final_AH: Tensor, final_norm: str) -> Tensor:
        """Final states as lm_head takes them: normed here when they were captured before the norm."""
        if final_norm == "post":
            return final_AH
        wide = final_AH.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        return (wide * scale * self.norm_H.float()).to(final_AH.dtype)

    @torch.no_grad()
    def choice(self, final_AH: Tensor) -> Tensor:
        """Argmax over the full vocabulary, int64 [A]: that of `scan`, in a third of its passes."""
        n = len(final_AH)
        best_A = torch.full((n,), -torch.inf, device=final_AH.device)
        where_A = torch.zeros(n, dtype=torch.long, device=final_AH.device)
        for start, raw_AC in self._products(final_AH):
            # A rule of no cap and scale leaves the order: the products are compared as they are.
            logits_AC = raw_AC if self.rule == LogitRule() else self.rule(raw_AC)
            top = logits_AC.max(dim=-1)
            better = top.values > best_A
            best_A = torch.where(better, top.values.float(), best_A)
            where_A = torch.where(better, top.indices + start, where_A)
        return where_A

    def _products(self, final_AH: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first token, states x lm_head) of chunks of the vocabulary.

        Few rows: few, large chunks, of whole multiples for the fast kernels' sake.
        """
        n = len(final_AH)
        size = VOCAB_CHUNK * max(1, LOGITS_AT_ONCE // max(1, n) // VOCAB_CHUNK)
        for start in range(0, self.vocab_size, size):
            yield start, final_AH @ self.head_VH[start : start + size].to(final_AH.dtype).t()

    @torch.no_grad()
    def scan(self, final_AH: Tensor) -> tuple[Tensor, Tensor]:
        """Over the full vocabulary: argmax int64 [A] and logsumexp float32 [A].

        Streamed over chunks of the vocabulary: [A, V] is never held. The lowest index wins ties.
        """
        n = len(final_AH)
        best_A = torch.full((n,), -torch.inf, device=final_AH.device)
        where_A = torch.zeros(n, dtype=torch.long, device=final_AH.device)
        lse_A = best_A.clone()
        for start, raw_AC in self._products(final_AH):
            logits_AC = self.rule(raw_AC)
            top = logits_AC.max(dim=-1)
            better = top.values > best_A
            best_A = torch.where(better, top.values, best_A)
            where_A = torch.where(better, top.indices + start, where_A)
            lse_A = torch.logaddexp(lse_A, logits_AC.logsumexp(dim=-1))
        return where_A, lse_A

    @torch.no_grad()
    def drawn(
        self, final_AH: Tensor, tokens_AX: Tensor, *, temperature: float, top_p: float, top_k: int
    ) -> Tensor:
        """Probability float64 [A, X] that the target samples each of a row's X tokens.

        Of the whole vocabulary after temperature, top_k and top_p (the token that crosses top_p is
        kept, as in SGLang), renormalised. `temperature` must be positive.
        """
        parts = []
        size = max(1, DRAWN_AT_ONCE // self.vocab_size)
        pieces = zip(torch.split(final_AH, size), torch.split(tokens_AX, size), strict=True)
        for final, tokens in pieces:
            logits = self.rule(final @ self.head_VH.to(final.device, final.dtype).t())
            p = torch.softmax(logits.double() / temperature, dim=-1)
            ranked, order = p.sort(dim=-1, descending=True, stable=True)
            kept = ranked.cumsum(-1) - ranked < top_p
            if top_k > 0:
                kept[:, top_k:] = False
            ranked = ranked * kept
            p = torch.zeros_like(p).scatter_(-1, order, ranked / ranked.sum(-1, keepdim=True))
            parts.append(p.gather(-1, tokens))
        return torch.cat(parts)

    def draft_head(self, target_ids_U: Tensor) -> Tensor:
        """The rows of lm_head that the draft vocabulary names, [U, H]."""
        return self.head_VH[target_ids_U]

    def draft_logits(self, final_AH: Tensor, draft_head_UH: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary, float32 [A, U]."""
        return self.rule(F.linear(final_AH, draft_head_UH.to(final_AH.dtype)))


def load_target(directory: Path) -> Target:
    """Read config.json and three tensors of a target's checkpoint directory.

    Raises ConfigError: no checkpoint, a tensor is missing, or lm_head is quantised.
    """
    path = directory / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"no target checkpoint: {e!r}", where=path,
            fix="give --target-weights: a directory with config.json and safetensors",
        ) from e  # fmt: skip
    text = raw.get("text_config") or raw
    files = _tensor_files(directory)
    embed = _read(files, [f"{p}embed_tokens.weight" for p in PREFIXES], directory)
    norm = _read(files, [f"{p}norm.weight" for p in PREFIXES], directory)
    heads = [f"{h}.weight" for h in HEADS]
    packed = [n for n in files if n.startswith(tuple(f"{h}." for h in HEADS)) and n not in heads]
    if packed:
        raise _quantised(directory, packed[0])
    tied = bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)))
    head = embed if tied or not any(h in files for h in heads) else _read(files, heads, directory)
    for name, tensor in (("lm_head", head), ("embed_tokens", embed)):
        if tensor.dtype not in FLOATS:
            raise _quantised(directory, f"{name} in {tensor.dtype}")
    if not tied and head is embed:
        raise ConfigError(
            "lm_head.weight is missing and the embedding is not tied", where=directory
        )
    scale = float(text.get("logit_scale") or 1.0) / float(text.get("logits_scaling") or 1.0)
    return Target(
        embed_VH=embed,
        head_VH=head,
        norm_H=norm,
        norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rule=LogitRule(scale, float(text.get("final_logit_softcapping") or 0.0)),
        model_type=str(text.get("model_type", raw.get("model_type", "llama"))),
        context_length=int(text.get("max_position_embeddings", 0)),
        config=text,
    )


def _quantised(directory: Path, what: str) -> ConfigError:
    return ConfigError(
        f"lm_head is quantised or packed ({what})", where=directory,
        fix="give a checkpoint whose lm_head and embedding are bf16, fp16 or fp32",
    )  # fmt: skip


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file; by the index where there is one."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.exists():
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {n: directory / f for n, f in names.items()}
        found: dict[str, Path] = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(str(file), framework="pt") as f:
                found |= dict.fromkeys(f.keys(), file)
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise ConfigError(f"no safetensors can be read: {e!r}", where=directory) from e
    if not found:
        raise ConfigError("no safetensors", where=directory, fix="give --target-weights")
    return found


def _read(files: dict[str, Path], names: list[str], directory: Path) -> Tensor:
    name = next((n for n in names if n in files), None)
    if name is None:
        raise ConfigError(f"the target has no tensor {' or '.join(names[:2])}", where=directory)
    try:
        with safe_open(str(files[name]), framework="pt") as f:
            tensor: Tensor = f.get_tensor(name)
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"{name} cannot be read: {e}", where=files[name]) from e
    return tensor
