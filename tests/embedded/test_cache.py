"""The cache of keys and values, apart from the engine."""

from __future__ import annotations

from pathlib import Path

import torch

from datagen.embedded.cache import STEP, SequenceCache
from datagen.embedded.config import LlamaConfig
from tests.tiny import HEADS, HIDDEN, KV_HEADS, LAYERS, write_tiny_checkpoint


def test_growing_keeps_what_is_held(tmp_path: Path) -> None:
    cache = SequenceCache(LlamaConfig.read(write_tiny_checkpoint(tmp_path / "tiny")), 5)
    for layer in range(LAYERS):
        cache.layer(layer)[:, :5] = float(layer)
    cache.length = 5
    cache.reserve(STEP + 1)
    assert cache.capacity == 2 * STEP
    keys, values = cache.views(5)
    for layer in range(LAYERS):
        for held in (keys[layer], values[layer]):
            assert held.shape == (1, KV_HEADS, 5, HIDDEN // HEADS)
            assert torch.all(held == float(layer))
