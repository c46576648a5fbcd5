"""Losses against their textbook forms, their slopes against autograd, the vocabulary's edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datagen.drafter.loss import Goal, divergence, goal_of, pair_losses, pairs_of
from datagen.drafter.metrics import Acceptance, measure
from datagen.drafter.model import unrolled
from datagen.drafter.rows import pack
from datagen.drafter.settings import LossKind
from datagen.drafter.target import LogitRule
from tests.drafter.small import U, V, drafter, eager, sample, target, vocab


def textbook(logits: Tensor, goal: Tensor, label: Tensor, kind: str) -> Tensor:
    q, p = logits.softmax(-1), goal.softmax(-1)
    if kind == "kl":
        return F.kl_div(q.log(), p, reduction="none").sum(-1)
    if kind == "lk":
        return -torch.minimum(p, q).sum(-1).log()
    return F.cross_entropy(logits, label, reduction="none")


@pytest.mark.parametrize("kind", ["kl", "lk", "ce"])
def test_losses_and_slopes_are_those_of_the_textbook(kind: LossKind) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(7, U, generator=g, dtype=torch.float64, requires_grad=True)
    goal = torch.randn(7, U, generator=g, dtype=torch.float64) * 2
    label = torch.randint(U, (7,), generator=g)
    expected = textbook(logits, goal, label, kind)
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    found, found_slope = divergence(logits.detach(), goal, label, kind)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(found_slope, slope)


@pytest.mark.parametrize("kind", ["kl", "lk", "ce"])
def test_the_fused_loss_has_the_gradients_of_the_plain_one(
    kind: LossKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datagen.drafter.loss.chunk_of", lambda _: 5)
    depths, aim, words = 3, target(), vocab()
    samples = [sample(14, 5, 0), sample(9, 4, 1)]
    batch = pack(samples, depths)
    head = aim.draft_head(torch.from_numpy(words.target_ids_U))
    goal = goal_of(batch, aim, head, t2d_V=words.t2d, final_norm="post", drop_outside=True)
    pairs = pairs_of(batch, goal, words.draft_ids, kind)
    weight = torch.linspace(0.5, 2.0, len(pairs.row_P))
    gradients = []
    for fused in (True, False):
        model = drafter()
        h = unrolled(model, batch, aim.embed_VH, eager(batch), depths)
        h_PH = model.norm(h[pairs.row_P, pairs.depth_P])
        if fused:
            loss, each, choice = pair_losses(h_PH, model.lm_head.weight, goal, pairs, weight, kind)
            assert each.shape == choice.shape == pairs.row_P.shape
        else:
            assert goal.logits_AU is not None
            logits = model.lm_head(h_PH)
            wanted = goal.logits_AU[pairs.target_P]
            loss = (textbook(logits, wanted, pairs.draft_label_P, kind) * weight).sum()
        (loss * 3).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-4, atol=1e-5)


def test_rows_whose_target_choice_no_draft_token_can_be_are_left_out() -> None:
    batch, aim, words = pack([sample(30, 5)], 3), target(), vocab()
    head = aim.draft_head(torch.from_numpy(words.target_ids_U))
    assert batch.final_AH is not None
    choice = (batch.final_AH @ aim.head_VH.t()).argmax(-1)
    inside = words.t2d[choice]
    assert 0 < int(inside.sum()) < len(inside)
    kept = goal_of(batch, aim, head, t2d_V=words.t2d, final_norm="post", drop_outside=True)
    pairs = pairs_of(batch, kept, words.draft_ids, "kl")
    assert bool(inside[pairs.target_P].all())
    assert len(pairs.row_P) == int((batch.mask_AK & inside[batch.target_AK]).sum())
    every = goal_of(batch, aim, head, t2d_V=words.t2d, final_norm="post", drop_outside=False)
    assert len(pairs_of(batch, every, words.draft_ids, "kl").row_P) == int(batch.mask_AK.sum())


def test_the_full_vocabulary_is_scanned_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    aim = replace(target(), rule=LogitRule(scale=0.5, cap=3.0))
    states = torch.randn(11, 16, generator=torch.Generator().manual_seed(1))
    logits = 3.0 * torch.tanh(states @ aim.head_VH.t() * 0.5 / 3.0)
    for size in (1, 7, V, 1000):
        monkeypatch.setattr("datagen.drafter.target.VOCAB_CHUNK", size)
        monkeypatch.setattr("datagen.drafter.target.LOGITS_AT_ONCE", 0)
        best, lse = aim.scan(states)
        assert torch.equal(best, logits.argmax(-1))
        assert torch.equal(aim.choice(states), best)
        assert torch.equal(target().choice(states), target().scan(states)[0])
        torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_a_recorded_token_outside_the_draft_vocabulary_is_a_miss_at_every_depth() -> None:
    depths, aim, words, model = 3, target(), vocab(), drafter()
    batch = pack([sample(60, 5)], depths)
    result = measure(
        model, aim, [batch], depths=depths, attention="eager", final_norm="post"
    )  # fmt: skip
    with torch.no_grad():
        h = model.norm(unrolled(model, batch, aim.embed_VH, eager(batch), depths))
        proposed = words.target_ids_U[model.lm_head(h).argmax(-1).numpy()]
    eligible, hits = [0] * depths, [0] * depths
    for row in range(len(h)):
        for k in range(depths):
            if not batch.mask_AK[row, k]:
                break
            eligible[k] += 1
            if proposed[row, k] != int(batch.labels_AK[row, k]):
                break
            hits[k] += 1
    assert (result.hits, result.eligible) == (hits, eligible)
    outside = ~words.t2d[batch.labels_AK[:, 0].clamp(min=0)] & batch.mask_AK[:, 0]
    assert outside.any()
    best = (batch.final_AH @ aim.head_VH.t()).argmax(-1)  # type: ignore[operator]
    agreeing = (best == batch.labels_AK[:, 0])[batch.mask_AK[:, 0]]
    assert result.agreeing == int(agreeing.sum())


def test_predicted_accept_len_is_the_sum_of_the_chain() -> None:
    counted = Acceptance([6, 3, 0], [10, 6, 3])
    assert counted.conditional == [0.6, 0.5, 0.0]
    assert counted.predicted_accept_len == pytest.approx(1 + 0.6 + 0.3)


def test_ce_trains_only_on_recorded_tokens_that_are_draft_tokens() -> None:
    batch, words = pack([sample(30, 5)], 2), vocab()
    pairs = pairs_of(batch, Goal(None, None), words.draft_ids, "ce")
    labels = batch.labels_AK[pairs.row_P, pairs.depth_P]
    assert torch.equal(torch.from_numpy(words.target_ids_U)[pairs.draft_label_P], labels)
    covered = words.t2d[batch.labels_AK.clamp(min=0)] & batch.mask_AK
    assert len(labels) == int(covered.sum())
