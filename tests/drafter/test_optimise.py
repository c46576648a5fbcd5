"""Which optimizer changes which weight, by how much, and what is kept of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from datagen.drafter.optimise import moments, optimizers, restore_moments
from datagen.drafter.settings import OptimizerKind, TrainConfig
from datagen.errors import ConfigError, DatagenError, FingerprintMismatch
from datagen.finetune import finetune, finetune_config
from tests.drafter.run import tiny_target, write_run
from tests.drafter.small import CPU, drafter

TURNED = {
    "fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
}  # fmt: skip


def stepped(kind: OptimizerKind, steps: int = 1, **changes: Any) -> tuple[dict[str, Tensor], Any]:
    """By name, how far a weight has moved; and what was trained."""
    model = drafter()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = optimizers(model, TrainConfig(optimizer=kind, **changes), CPU)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw)
        optimizer.step()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}, (model, optimizer)


def test_muon_turns_the_matrices_but_lm_head() -> None:
    adamw, _ = stepped("adamw", learning_rate=1e-3)
    muon, (model, optimizer) = stepped("muon", learning_rate=1e-3)
    kept = moments(optimizer, model)
    turned = {n.removeprefix("momentum_buffer.") for n in kept if n.startswith("momentum")}
    assert turned == TURNED
    assert set(adamw) - TURNED == {n.removeprefix("exp_avg.") for n in kept if "exp_avg." in n}
    for name, moved in muon.items():
        if name not in TURNED:
            assert torch.equal(moved, adamw[name]), name
            continue
        # Orthogonal up to its five iterations: every singular value within a factor of the others.
        size = torch.linalg.svdvals(moved)
        assert size.max() < 2.5 * size.min(), name


def turned_by_hand(gradients: list[Tensor], rate: float) -> list[Tensor]:
    """Steps of Muon in float64: Nesterov's momentum, and the iterations on the singular values alone."""
    momentum = torch.zeros_like(gradients[0], dtype=torch.float64)
    steps = []
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient
        u, s, v = torch.linalg.svd(gradient + 0.95 * momentum, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        steps.append(-rate * 0.2 * max(gradient.shape) ** 0.5 * u @ torch.diag(s) @ v)
    return steps


@pytest.mark.parametrize("shape", [(64, 512), (512, 64), (64, 64)])
def test_a_step_of_muon_is_its_formula_and_of_one_size_in_every_shape(
    shape: tuple[int, int],
) -> None:
    module = torch.nn.Linear(shape[1], shape[0], bias=False)
    optimizer = optimizers(module, TrainConfig(optimizer="muon", learning_rate=1e-3), CPU)
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=draw) for _ in range(3)]
    for gradient, wanted in zip(gradients, turned_by_hand(gradients, 1e-3), strict=True):
        before = module.weight.detach().clone()
        module.weight.grad = gradient
        optimizer.step()
        moved = (module.weight.detach() - before).double()
        # The iterations run in bfloat16; a momentum of 0.9 would be further off than this.
        assert (moved - wanted).norm() < 0.03 * wanted.norm()
        # 0.2 where every singular value were 1; of noise they leave 0.7 to 1.2.
        assert 0.15 < moved.square().mean().sqrt() / 1e-3 < 0.2


def test_norms_do_not_decay_and_each_matrix_does_once() -> None:
    for kind in ("adamw", "muon"):
        plain, (model, _) = stepped(kind, weight_decay=0.0, learning_rate=1e-3)
        decayed, _ = stepped(kind, weight_decay=0.5, learning_rate=1e-3)
        start = dict(drafter().named_parameters())
        for name in plain:
            lost = start[name] * (5e-4 if model.get_parameter(name).dim() > 1 else 0.0)
            torch.testing.assert_close(plain[name] - decayed[name], lost, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_is_kept_goes_on_where_it_was(kind: OptimizerKind) -> None:
    whole, _ = stepped(kind, 2)
    model = drafter()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    first, (other, optimizer) = stepped(kind, 1)
    stored = {n: t.clone() for n, t in moments(optimizer, other).items()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(other.get_parameter(name))
    assert first.keys() == start.keys()
    again = optimizers(model, TrainConfig(optimizer=kind), CPU)
    assert moments(again, model) == {}
    restore_moments(again, model, stored)
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw)
    again.step()
    for name, moved in whole.items():
        assert torch.equal(model.get_parameter(name) - start[name], moved), name
    with pytest.raises(KeyError):
        restore_moments(again, model, {})


def test_stopped_and_resumed_training_with_muon_ends_bit_identical(tmp_path: Path) -> None:
    write_run(tmp_path / "run", tiny_target(tmp_path), train=24, heldout=6)
    calls = iter(range(1, 100))

    def train(out: str, stop_after: int = 0, **changes: Any) -> Any:
        settings = {
            "manifest": str(tmp_path / "run" / "manifest.json"), "out": str(tmp_path / out),
            "target_weights": str(tmp_path / "tiny-llama"), "optimizer": "muon", "depths": 3,
            "batch_tokens": 128, "learning_rate": 1e-2, "max_steps": 9, "draft_vocab": 256,
            "device": "cpu", "heldout": 4, "export_dtype": "float32", "accumulate": 2, "ema": 0.9,
        }  # fmt: skip
        config = finetune_config(**settings | changes)
        return finetune(config, lambda _: None, lambda: next(calls) == stop_after)

    def digest(outcome: Any) -> str:
        return hashlib.sha256((outcome.final / "model.safetensors").read_bytes()).hexdigest()

    whole = train("whole")
    assert whole.after["predicted_accept_len"] > whole.before["predicted_accept_len"] + 0.05
    calls = iter(range(1, 100))
    with pytest.raises(DatagenError, match="after step 4 of 9"):
        train("out", stop_after=4)
    assert digest(train("out")) == digest(whole)
    with pytest.raises(FingerprintMismatch, match="optimizer is adamw, was muon"):
        train("out", optimizer="adamw")
    with pytest.raises(ConfigError, match="optimizer"):
        finetune_config(manifest="x", optimizer="sgd")
