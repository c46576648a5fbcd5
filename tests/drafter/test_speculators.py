"""The same weights, batch and mask give vllm-project/speculators' loss; our conversion loads there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from datagen.drafter.model import Drafter
from datagen.drafter.rows import Sample, pack
from datagen.drafter.settings import LossKind, TrainConfig
from datagen.drafter.speculators import write_speculators
from datagen.drafter.step import StepLoss, depth_weights
from datagen.drafter.target import Target
from tests.drafter.small import drafter, sample, target, vocab

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("speculators") is None, reason="speculators is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]

DEPTHS = 3


def their_mask(s: Sample) -> torch.Tensor:
    """speculators' rule as [row, depth]: the token a row is fed at a depth is supervised.

    It trains rows of the context at deeper depths, and would train what follows the end.
    """
    n = len(s.ids_N)
    fed = torch.arange(n - 2)[:, None] + 1 + torch.arange(DEPTHS)
    return (fed >= s.n_context) & (fed < n - 1)


def their_model(directory: Path, aim: Target) -> Any:
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(str(directory))
    config.transformer_layer_config._attn_implementation = "eager"
    from safetensors.torch import load_file

    model = Eagle3DraftModel(config)
    weights = load_file(str(directory / "model.safetensors"))
    found = model.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {"verifier_norm.weight", "verifier_lm_head.weight"}
    with torch.no_grad():
        model.verifier_norm.weight.copy_(aim.norm_H)
        model.verifier_lm_head.weight.copy_(aim.draft_head(torch.from_numpy(vocab().target_ids_U)))
    return model.float().eval()


def their_loss(model: Any, samples: Sequence[Sample], decay: float, name: str) -> float:
    from speculators.losses import resolve_loss_config

    parts: dict[str, list[torch.Tensor]] = {"g": [], "x": [], "y": [], "m": [], "d": [], "p": []}
    for number, s in enumerate(samples):
        n = len(s.ids_N)
        assert s.final_NH is not None
        mask = torch.arange(n) >= s.n_context
        mask[n - 1] = False
        parts["g"].append(s.features_NW[:-1])
        parts["x"].append(s.ids_N[1:])
        parts["y"].append(s.final_NH[1:])
        parts["m"].append(mask[1:])
        parts["d"].append(torch.full((n - 1,), number))
        parts["p"].append(torch.arange(1, n))
    g, x, y, m, d, p = (torch.cat(v)[None] for v in parts.values())
    with torch.no_grad():
        _, loss, _ = model(
            hidden_states=g, input_ids=x, document_ids=d, loss_mask=m, position_ids=p,
            verifier_last_hidden_states=y, ttt_steps=DEPTHS, ttt_step_loss_decay=decay,
            loss_config=resolve_loss_config(name, "eager"),
        )  # fmt: skip
    return float(loss)


def our_loss(
    model: Drafter, samples: Sequence[Sample], aim: Target, decay: float, kind: LossKind
) -> float:
    masks = [their_mask(s) for s in samples]
    batch = pack(samples, DEPTHS, masks)
    config = TrainConfig(
        loss=kind, depths=DEPTHS, decay=decay, normalise="masked", drop_outside=False
    )
    step = StepLoss(
        model, aim, vocab(), config, final_norm="pre", attention="eager", compiled=False
    )
    rows = tuple(int(c) for c in batch.mask_AK.sum(0))
    with torch.no_grad():
        weights = depth_weights(config, rows, batch.n_tokens, torch.device("cpu"))
        return float(step(batch, weights)[0])


@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True, "norm_output": True}])
def test_the_loss_is_theirs_on_one_sample_and_after_conversion(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    aim, made = target(), drafter(scale=4.0, **options)
    write_speculators(
        tmp_path, made.config, made.state_dict(), embed_VH=aim.embed_VH, target="none",
        dtype="float32",
    )  # fmt: skip
    theirs = their_model(tmp_path, aim)
    for seed in range(3):
        samples = [sample(20 + seed, 6, seed)]
        expected = their_loss(theirs, samples, 1.0, "kl_div")
        assert our_loss(made, samples, aim, 1.0, "kl") == pytest.approx(expected, abs=1e-5), seed


@pytest.mark.parametrize(("kind", "name"), [("kl", "kl_div"), ("lk", "nla")])
def test_the_loss_is_theirs_on_packed_samples_with_decay(
    tmp_path: Path, kind: LossKind, name: str
) -> None:
    aim, made = target(), drafter(scale=4.0)
    write_speculators(
        tmp_path, made.config, made.state_dict(), embed_VH=aim.embed_VH, target="none",
        dtype="float32",
    )  # fmt: skip
    # Where samples meet, their shift feeds the next sample's first tokens: to masked rows only, as
    # long as every context is longer than the unroll.
    samples = [sample(21, 6, 0), sample(30, 11, 1), sample(13, 5, 2)]
    expected = their_loss(their_model(tmp_path, aim), samples, 0.8, name)
    assert our_loss(made, samples, aim, 0.8, kind) == pytest.approx(expected, abs=1e-5)
