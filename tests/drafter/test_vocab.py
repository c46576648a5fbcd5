"""Vocabulary maps: the most frequent tokens, the lock, the coverage."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datagen.drafter.vocab import Coverage, DraftVocab, by_frequency, from_maps
from datagen.errors import ConfigError


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(0, 29), st.integers(1, 5), max_size=30), st.integers(1, 30))
def test_the_map_holds_the_most_frequent_tokens(counts: dict[int, int], size: int) -> None:
    made = by_frequency(counts, size, 30)
    wanted = sorted(range(30), key=lambda i: (-counts.get(i, 0), i))[:size]
    assert made.target_ids_U.tolist() == sorted(wanted)
    assert from_maps(made.d2t, made.t2d).digest == made.digest
    draft = torch.arange(size)
    assert torch.equal(made.draft_ids[draft + made.d2t], draft)
    assert int((made.draft_ids >= 0).sum()) == size


def test_stop_tokens_are_always_inside() -> None:
    assert by_frequency({5: 100, 6: 99}, 2, 10, always=[2]).target_ids_U.tolist() == [2, 5]


def test_maps_that_disagree_or_are_of_another_vocabulary_are_refused() -> None:
    made = by_frequency({5: 1}, 4, 10)
    with pytest.raises(ConfigError, match="different tokens"):
        from_maps(made.d2t, made.t2d.roll(1))
    with pytest.raises(ConfigError, match="increasing"):
        from_maps(made.d2t.flip(0) * 3, made.t2d)
    with pytest.raises(ConfigError, match="another target"):
        by_frequency({11: 1}, 4, 10)


def test_another_map_has_another_lock() -> None:
    one = DraftVocab(np.array([1, 2, 3]), 10)
    assert one.digest != DraftVocab(np.array([1, 2, 4]), 10).digest
    assert one.digest != DraftVocab(np.array([1, 2, 3]), 11).digest


def test_coverage_counts_tokens_by_group() -> None:
    coverage = Coverage.of(DraftVocab(np.array([1, 5, 9]), 12))
    coverage.add("en", np.array([1, 1, 2, 11], dtype=np.int32))
    coverage.add("de", np.array([9], dtype=np.int32))
    assert coverage.shares() == {"de": 1.0, "en": 0.5}


def test_a_map_of_kimis_size_takes_under_a_second() -> None:
    counts = {i: (i * 2654435761) % 100_003 for i in range(163_840)}
    started = time.process_time()
    by_frequency(counts, 32_000, 163_840)
    assert time.process_time() - started < 1.0
