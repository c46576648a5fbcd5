"""The plugin's self-test, on a small pre-norm decoder: right boundaries pass, a shift by one does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from datagen.capture.sglang_proof import PATIENCE, BoundaryMismatch, SelfTest

HIDDEN, LAYERS = 32, 6


class RMSNorm(nn.Module):
    """By the names of SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, *, hidden_states: Tensor, **_: object) -> Tensor:
        out: Tensor = self.mix(hidden_states)
        return out


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norm(), Attention()

    def forward(self, positions: Tensor, stream: Tensor) -> Tensor:
        x = self.input_layernorm(stream)
        out: Tensor = stream + self.self_attn(
            positions=positions, hidden_states=x, forward_batch=None
        )
        return out


class Inner(nn.Module):
    def __init__(self, norm: type[nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm) for _ in range(LAYERS))

    @torch.no_grad()
    def streams(self, n: int = 7) -> list[Tensor]:
        """The stream entering each layer."""
        stream, entering = torch.randn(n, HIDDEN), []
        for layer in self.layers:
            entering.append(stream)
            stream = layer(torch.arange(n), stream)
        return entering


@pytest.fixture
def inner() -> Inner:
    torch.manual_seed(0)
    return Inner()


@pytest.mark.parametrize("packed", [True, False])
def test_the_right_boundaries_pass_and_the_hooks_go(inner: Inner, packed: bool) -> None:
    proof = SelfTest(inner, (1, 3, 4), HIDDEN)
    assert proof.verdict.startswith("pending")
    entering = inner.streams()
    kept = [entering[b] for b in (1, 3, 4)]
    proof.compare(torch.cat(kept, -1) if packed else kept, prefill=True)
    assert proof.verdict.startswith("passed: cosine with the decoder layers' input 1: 1.0000")
    assert not proof.pending
    assert not any(layer.self_attn._forward_pre_hooks for layer in inner.layers)  # type: ignore[union-attr]


@pytest.mark.parametrize("captured", [(2, 4, 5), (0, 2, 3), (1, 3, 5)])
def test_a_boundary_shifted_by_one_ends_the_server(inner: Inner, captured: tuple[int, ...]) -> None:
    proof = SelfTest(inner, (1, 3, 4), HIDDEN)
    entering = inner.streams()
    near = [float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairwise(entering)]
    assert min(near) > 0.7  # so that a weak check would pass it
    with pytest.raises(BoundaryMismatch, match="not what the decoder layers read"):
        proof.compare([entering[b] for b in captured], prefill=True)


def test_decodes_are_not_compared_and_graphs_end_in_none(inner: Inner) -> None:
    proof = SelfTest(inner, (1, 3, 4), HIDDEN)
    entering = inner.streams(1)
    proof.compare([entering[0]] * 3, prefill=False)
    assert proof.pending
    for _ in range(PATIENCE):  # replayed graphs call no hooks
        proof.compare([entering[b] for b in (1, 3, 4)], prefill=True)
    assert proof.verdict.startswith("none: no comparable eager prefill")


def test_a_norm_that_is_not_known_is_no_proof(inner: Inner) -> None:
    class GemmaRMSNorm(RMSNorm):
        pass

    proof = SelfTest(Inner(GemmaRMSNorm), (1, 3, 4), HIDDEN)
    assert proof.verdict.startswith("none: layer 1 has no RMSNorm")
    assert not proof.pending
