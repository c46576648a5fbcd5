"""The unroll against a slot-by-slot drafter, and its independence of packing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from datagen.drafter.attention import attention_for
from datagen.drafter.model import Drafter, unrolled
from datagen.drafter.rows import Sample, pack
from tests.drafter.small import CPU, drafter, eager, sample, target


def one_row(model: Drafter, s: Sample, t: int, depths: int, embed_VH: Tensor) -> list[Tensor]:
    """The chain of row t, one token at a time, with a cache of single slots: the engine's way."""
    c, layer = model.config, model.midlayer
    groups = c.num_heads // c.num_kv_heads
    slots: list[tuple[Tensor, Tensor]] = []

    def step(token: Tensor, h_H: Tensor, position: int) -> Tensor:
        x = layer.joined(embed_VH[token][None].to(h_H.dtype), h_H[None])
        angles = model.angles(torch.tensor([position]))
        q = layer.self_attn.queries(x, angles)[0]
        k, v = layer.self_attn.keys_values(x, angles)
        slots.append((k[0], v[0]))
        out = torch.empty(c.num_heads, c.head_dim, dtype=h_H.dtype)
        for head in range(c.num_heads):
            scores = torch.stack([q[head] @ k[head // groups] for k, _ in slots])
            weights = (scores / math.sqrt(c.head_dim)).softmax(0)
            out[head] = sum(w * v[head // groups] for w, (_, v) in zip(weights, slots, strict=True))
        return layer.finished(h_H[None], out[None])[0]

    for row in range(t):
        step(s.ids_N[row + 1], model.project(s.features_NW[row][None])[0], row)
    h = model.project(s.features_NW[t][None])[0]
    hs = []
    for k in range(depths):
        h = step(s.ids_N[t + 1 + k], h, t + k)
        hs.append(h)
        h = model.norm(h) if c.norm_output else h
    return hs


@pytest.mark.parametrize("options", [{}, {"norm_output": True, "norm_before_fc": True}])
def test_the_unroll_is_the_engines_chain_of_every_row(options: dict[str, bool]) -> None:
    model, depths = drafter(**options).double(), 3
    embed = target().embed_VH.double()
    samples = [sample(9, 3, 0, torch.float64), sample(11, 6, 1, torch.float64)]
    batch = pack(samples, depths)
    with torch.no_grad():
        h_AKH = unrolled(model, batch, embed, eager(batch), depths)
        a = 0
        for s in samples:
            n = len(s.ids_N)
            for t in range(s.n_context - 1, n - 2):
                usable = min(depths, n - 1 - t)
                for k, h in enumerate(one_row(model, s, t, usable, embed)):
                    torch.testing.assert_close(h_AKH[a, k], h, rtol=1e-5, atol=1e-6)
                a += 1


def test_neighbours_and_what_follows_a_row_change_nothing() -> None:
    model, embed = drafter(), target().embed_VH
    one, other = sample(20, 6, 0), sample(30, 4, 1)
    alone, packed = pack([one], 3), pack([other, one, other], 3)
    longer = Sample(
        "longer",
        torch.cat([one.ids_N, other.ids_N]),
        6,
        torch.cat([one.features_NW, other.features_NW]),
        None,
    )
    appended = pack([longer], 3)
    with torch.no_grad():
        h = unrolled(model, alone, embed, eager(alone), 3)
        among = unrolled(model, packed, embed, eager(packed), 3)
        before = unrolled(model, appended, embed, eager(appended), 3)
    a = packed.active[0]
    torch.testing.assert_close(among[a : a + len(h)], h)
    rows = len(h) - 2  # the last rows of `one` read tokens that its end cut off
    torch.testing.assert_close(before[:rows], h[:rows])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_both_forms_of_attention_agree() -> None:
    model, embed = drafter(), target().embed_VH
    batch = pack([sample(20, 6, 0), sample(33, 20, 1), sample(5, 2, 2)], 3)
    with torch.no_grad():
        plain = unrolled(model, batch, embed, eager(batch), 3)
        fused = unrolled(model, batch, embed, attention_for(batch, "flex", CPU), 3)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_recomputed_activations_give_the_same_gradients() -> None:
    batch, embed = pack([sample(20, 6, 0), sample(9, 3, 1)], 4), target().embed_VH
    gradients = []
    for recompute in (False, True):
        model = drafter()
        model.recompute = recompute
        unrolled(model, batch, embed, eager(batch), 4).square().sum().backward()
        gradients.append([p.grad for n, p in model.named_parameters() if "lm_head" not in n][:-1])
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, recomputed, rtol=1e-3, atol=1e-3)
