"""A step whose kernels depend on shapes alone has the loss and gradients of one that selects its pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from datagen.drafter import gradients
from datagen.drafter.gradients import Recorded, may_be_recorded, recorded_shapes
from datagen.drafter.model import Drafter
from datagen.drafter.ranks import Ranks
from datagen.drafter.rows import Batch, pack, padded
from datagen.drafter.settings import LossKind, RunConfig, TrainConfig
from datagen.drafter.step import StepLoss, Sums, bad_samples, depth_weights
from datagen.drafter.vocab import DraftVocab
from datagen.errors import ConfigError
from tests.drafter.small import CPU, U, V, drafter, sample, target, vocab

CUDA = torch.cuda.is_available()
DEPTHS = 3


def packed() -> Batch:
    return pack([sample(24, 9, 0), sample(17, 6, 1)], DEPTHS)


def as_one_more_sample(batch: Batch, of: Batch) -> Batch:
    """The padding as a sample of its own, for the attention that goes sample by sample."""
    rows, active = len(batch.tokens_M) - sum(of.rows), len(batch.active_A) - sum(of.active)
    return replace(batch, rows=(*of.rows, rows), active=(*of.active, active))


def stepped(
    batch: Batch,
    kind: LossKind,
    *,
    fixed: bool,
    drop_outside: bool = True,
    words: DraftVocab | None = None,
) -> tuple[Tensor, Sums, dict[str, Tensor]]:
    model = drafter()
    config = TrainConfig(depths=DEPTHS, loss=kind, drop_outside=drop_outside)
    module = StepLoss(
        model, target(), words or vocab(), config, final_norm="post", attention="eager", compiled=False,
        fixed=fixed,
    )  # fmt: skip
    total, sums = module(batch, depth_weights(config, (20, 18, 16), 41, CPU))
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total.detach(), sums, grads


@pytest.mark.parametrize("kind", ["kl", "lk", "ce"])
def test_fixed_shapes_and_padding_change_nothing(kind: LossKind) -> None:
    batch = packed()
    grown = as_one_more_sample(padded(batch, 96, 32), batch)
    total, sums, grads = stepped(batch, kind, fixed=False)
    for other in (batch, grown):
        found, found_sums, found_grads = stepped(other, kind, fixed=True)
        torch.testing.assert_close(found, total)
        torch.testing.assert_close(found_sums.table_3K, sums.table_3K)
        assert grads.keys() == found_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6)


def test_a_state_that_is_no_number_names_its_sample_with_fixed_shapes_too() -> None:
    batch = packed()
    assert batch.final_AH is not None
    spoilt = batch.final_AH.clone()
    spoilt[batch.active[0] + 2] = torch.nan
    batch = replace(batch, final_AH=spoilt)
    grown = as_one_more_sample(padded(batch, 96, 32), batch)
    for other, fixed in ((batch, False), (grown, True)):
        _, sums, _ = stepped(other, "kl", fixed=fixed, drop_outside=False)
        assert bad_samples(batch, sums.bad_A) == ["s1"]


@pytest.mark.parametrize("fixed", [False, True])
def test_damage_in_a_row_that_no_draft_token_can_hit_is_named_and_stops_training(
    fixed: bool,
) -> None:
    batch = packed()
    assert batch.final_AH is not None
    row = batch.active[0] + 2
    spoilt = batch.final_AH.clone()
    spoilt[row] = torch.nan
    batch = replace(batch, final_AH=spoilt)
    chosen = int(target().choice(spoilt[row : row + 1]))
    words = DraftVocab(np.array([n for n in range(V) if n != chosen][:U]), V)
    assert not words.t2d[chosen], "what the NaN chooses is no draft token: its pairs do not train"
    other = as_one_more_sample(padded(batch, 96, 32), batch) if fixed else batch
    total, sums, grads = stepped(other, "kl", fixed=fixed, words=words)
    assert bad_samples(batch, sums.bad_A) == ["s1"]
    assert total.isnan()
    assert sums.table_3K.isfinite().all()
    assert all(g.isfinite().all() for g in grads.values()), "nothing of it reaches a weight"


def test_padding_is_seen_by_nothing_and_no_row_twice() -> None:
    batch = packed()
    grown = padded(batch, 96, 32)
    assert (len(grown.tokens_M), len(grown.active_A)) == (96, 32)
    added = grown.active_A[len(batch.active_A) :]
    assert len(set(added.tolist())) == len(added)
    assert torch.equal(added, grown.start_A[len(batch.active_A) :])
    assert not grown.mask_AK[len(batch.active_A) :].any()
    assert padded(grown, 96, 32).mask_AK.shape == grown.mask_AK.shape


def test_recorded_batches_have_at_most_four_shapes() -> None:
    for tokens in (8, 1000, 4096, 8192, 32768):
        rows, multiple = recorded_shapes(tokens)
        assert rows >= tokens
        assert rows % 128 == 0 == multiple % 128
        assert -(-tokens // multiple) <= 4


def test_the_device_that_is_asked_for_is_the_one_that_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[torch.device] = []
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: made.append(device))
    assert Ranks("cuda:1").device == torch.device("cuda", 1)
    assert current == made == [torch.device("cuda", 1)]
    for name in ("cuda", "cpu"):
        Ranks(name)
    assert len(current) == 1, "neither names another device than the current one"


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match="'cuda:63' cannot be used"):
        Ranks("cuda:63")


class OneGPU(Ranks):
    """A CUDA device that nothing is computed on."""

    def __init__(self, *, count: int = 1, kind: str = "cuda") -> None:
        self.device, self.count = torch.device(kind), count


def test_each_reason_alone_keeps_a_step_from_being_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, how = drafter(), RunConfig()
    assert may_be_recorded(model, how, OneGPU())
    assert may_be_recorded(model, RunConfig(attention="flex"), OneGPU())
    assert not may_be_recorded(model, how, OneGPU(kind="cpu"))
    assert not may_be_recorded(model, how, OneGPU(count=2))
    for other in (
        RunConfig(recompute=True), RunConfig(attention="eager"), RunConfig(graphs=False),
        RunConfig(compile=False),
    ):  # fmt: skip
        assert not may_be_recorded(model, other, OneGPU()), other
    weights = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(gradients, "RECORDED_WEIGHTS", weights)
    assert may_be_recorded(model, how, OneGPU())
    monkeypatch.setattr(gradients, "RECORDED_WEIGHTS", weights - 1)
    assert not may_be_recorded(model, how, OneGPU())


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_a_recorded_step_has_the_gradients_of_a_launched_one(kind: LossKind) -> None:
    device = torch.device("cuda")
    shapes = recorded_shapes(128)
    batches = [
        padded(pack([sample(n, 9, 0), sample(50, 6, 1)], DEPTHS), *shapes).pinned()
        for n in (24, 30)
    ]
    config = TrainConfig(depths=DEPTHS, loss=kind)
    weight = depth_weights(config, (60, 58, 56), 74, device)
    models: list[Drafter] = [drafter(head_dim=16).to(device) for _ in range(2)]
    aim = target().to(device, torch.float32)
    plain, fixed = (
        StepLoss(
            m, aim, vocab(), config, final_norm="post", attention="auto", compiled=True, fixed=f
        )
        for m, f in zip(models, (False, True), strict=True)
    )
    assert may_be_recorded(models[1], RunConfig(), Ranks("cuda"))
    recorded = Recorded(fixed, torch.float32, keeps=True)
    for first in range(2):
        for model in models:
            model.zero_grad(set_to_none=True)
        for batch in (batches[first], batches[1]):  # a replay, and gradients added up
            total, sums = plain(batch.to(device, torch.float32), weight)
            total.backward()
            found, found_sums = recorded(batch, weight, last=True)
            torch.testing.assert_close(found, total.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found_sums.table_3K, sums.table_3K, rtol=1e-4, atol=1e-4)
        for (name, one), other in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            torch.testing.assert_close(
                other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
