"""Inverse frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from datagen.drafter.rope import Rope
from datagen.errors import ConfigError

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    ],
)
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 50_000.0, **scaling}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, head_dim=64, max_position_embeddings=131_072,
        rope_parameters=parameters,
    )  # fmt: skip
    made = LlamaRotaryEmbedding(config)
    expected, size = made.inv_freq, made.attention_scaling
    found, found_size = Rope.read({"rope_parameters": parameters}, "here").table(64)
    torch.testing.assert_close(found, expected)
    assert found_size == pytest.approx(size)


def test_both_spellings_are_read_and_written() -> None:
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN, "rope_type": "yarn"}}
    rope = Rope.read(old, "here")
    assert rope == Rope.read({"rope_parameters": {"rope_theta": 5e4, **YARN}}, "here")
    written = rope.spelled()
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == 5e4
    assert Rope.read(written, "here") == rope


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "linear"])
def test_types_whose_angles_are_not_the_same_at_every_length_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=kind):
        Rope.read({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, "drafter/config.json")


def test_unknown_numbers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="wobble"):
        Rope.read({"rope_scaling": {**YARN, "wobble": 1.0}}, "drafter/config.json")
