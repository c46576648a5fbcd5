"""The cache of keys and values, apart from the engine."""

from __future__ import annotations

from pathlib import Path

import torch

from datagen.embedded.model import KVCache, LlamaConfig
from tests.tiny import write_tiny_checkpoint


def test_a_sequence_can_leave_after_the_cache_grew_in_a_forward_pass(
    tmp_path: Path,
) -> None:
    config = LlamaConfig.read(write_tiny_checkpoint(tmp_path / "tiny"))
    cache = KVCache(config, 4)
    for length in (KVCache.STEP - 2, 3, 5):
        cache.add(length)
    with torch.inference_mode():
        cache.reserve(KVCache.STEP + 1)
        cache.keys[:, 2, :, :5] = 7.0
    cache.remove(0)
    assert cache.lengths == [5, 3]
    assert torch.all(cache.keys[:, 0, :, :5] == 7.0)
