"""Proof inside SGLang: what is captured as boundary i is what decoder layer i really reads.

Neighbouring boundaries differ by a cosine of 0.95 to 0.97, so a shift by one passes any weak check and
costs acceptance. On the first eager prefill the captured stream, normalised here, must equal the input
of layer i's attention, which is taken by a hook of PyTorch and not by the capture. Needs torch alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
LEAST_COSINE = 0.999
PATIENCE = 64  # prefills without an eager forward, after which the test is given up


class BoundaryMismatch(RuntimeError):
    """The engine captures another state than the one its decoder layer reads."""


def _graph_is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class SelfTest:
    """Compares once. `verdict` begins with `pending`, `passed` or `none` (could not be run)."""

    def __init__(self, inner: torch.nn.Module, boundaries: Sequence[int], hidden: int) -> None:
        self.verdict = "pending: no eager prefill so far"
        self._boundaries, self._hidden, self._missed = tuple(boundaries), hidden, 0
        self._read: dict[int, Tensor] = {}
        self._norms: dict[int, tuple[Tensor, float]] = {}
        self._hooks: list[Any] = []
        for boundary in self._boundaries:
            layer = inner.layers[boundary]  # type: ignore[index]
            norm, attention = (getattr(layer, n, None) for n in ("input_layernorm", "self_attn"))
            if norm is None or attention is None or type(norm).__name__ != "RMSNorm":
                self._end(f"none: layer {boundary} has no RMSNorm before its attention")
                return
            self._norms[boundary] = (norm.weight.detach(), float(norm.variance_epsilon))
            self._hooks.append(
                attention.register_forward_pre_hook(self._reader(boundary), with_kwargs=True)
            )

    @property
    def pending(self) -> bool:
        """True until the comparison was made or given up."""
        return bool(self._hooks)

    def compare(self, aux: Tensor | Sequence[Tensor], *, prefill: bool) -> None:
        """Compare what was captured, [tokens, K*H] or K of [tokens, H], with what the layers read.

        Raises BoundaryMismatch.
        """
        read, self._read = self._read, {}
        if not prefill or _graph_is_captured():
            return
        captured = (
            list(torch.split(aux, self._hidden, -1)) if isinstance(aux, Tensor) else list(aux)
        )
        comparable = len(captured) == len(self._boundaries) == len(read) and all(
            read[b].shape == c.shape for b, c in zip(self._boundaries, captured, strict=True)
        )
        if not comparable:
            self._missed += 1
            if self._missed >= PATIENCE:
                self._end(f"none: no comparable eager prefill in {PATIENCE}")
            return
        cosines = {
            b: self._cosine(b, state_TH, read[b])
            for b, state_TH in zip(self._boundaries, captured, strict=True)
        }
        if not all(map(math.isfinite, cosines.values())):
            self._missed += 1  # a warm-up over unset memory
            return
        found = ", ".join(f"{b}: {c:.5f}" for b, c in cosines.items())
        if not min(cosines.values()) >= LEAST_COSINE:
            raise BoundaryMismatch(
                f"datagen capture: the captured states are not what the decoder layers read "
                f"(cosine by boundary: {found}; at least {LEAST_COSINE} needed)"
            )
        self._end(f"passed: cosine with the decoder layers' input {found}")

    def _cosine(self, boundary: int, state_TH: Tensor, read_TH: Tensor) -> float:
        weight_H, epsilon = self._norms[boundary]
        x_TH = state_TH.float()
        x_TH = x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + epsilon)
        x_TH = x_TH * weight_H.float()
        return float(torch.cosine_similarity(x_TH, read_TH.float(), dim=-1).mean())

    def _reader(self, boundary: int) -> Any:
        def read(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or _graph_is_captured():
                return  # nothing is computed yet
            state = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
            if isinstance(state, Tensor) and state.is_floating_point():
                self._read[boundary] = state.detach().clone()

        return read

    def _end(self, verdict: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._read.clear()
        self.verdict = verdict
        log.warning("datagen capture: self-test %s", verdict)
