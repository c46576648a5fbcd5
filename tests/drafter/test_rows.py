"""Rows, shift and mask, against the rule written out token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datagen.drafter.rows import NO_LABEL, Sample, pack, trained_counts, trained_rows
from tests.drafter.small import sample

lengths = st.tuples(st.integers(1, 9), st.integers(2, 9)).map(lambda pr: (sum(pr), pr[0]))


def test_the_first_trained_row_is_the_last_of_the_context_and_the_last_predicts_the_stop_token() -> (
    None
):
    rows = trained_rows(n_tokens=10, n_context=4)
    assert (rows[0], rows[-1]) == (3, 7)  # P-1, N-3


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=4), st.integers(1, 6))
def test_every_cell_of_a_packed_batch_is_what_the_rule_says(
    shapes: list[tuple[int, int]], depths: int
) -> None:
    samples = [sample(n, p, seed=i) for i, (n, p) in enumerate(shapes)]
    batch = pack(samples, depths)
    a, m = 0, 0
    for s, (n, p) in zip(samples, shapes, strict=True):
        x = s.ids_N.tolist()
        for t in range(n - 2):
            assert batch.tokens_M[m + t] == x[t + 1]
            assert batch.positions_M[m + t] == t
            assert torch.equal(batch.features_MW[m + t], s.features_NW[t])
        for t in range(p - 1, n - 2):
            assert batch.active_A[a] == m + t
            assert s.final_NH is not None
            assert batch.final_AH is not None
            for k in range(depths):
                exists = t + 2 + k <= n - 1
                supervised = exists and t + 2 + k >= p
                assert bool(batch.mask_AK[a, k]) == (t >= p - 1 and supervised)
                assert batch.labels_AK[a, k] == (x[t + 2 + k] if exists else NO_LABEL)
                if t + 1 + k < n:
                    assert batch.tokens_AK[a, k] == x[t + 1 + k]
                if exists:
                    state = batch.final_AH[batch.target_AK[a, k]]
                    assert torch.equal(state, s.final_NH[t + 1 + k])
            a += 1
        m += n - 2
    assert a == len(batch.active_A)
    assert m == len(batch.tokens_M)
    counts = [trained_counts(n, p, depths) for n, p in shapes]
    assert batch.mask_AK.sum(0).tolist() == [sum(c[k] for c in counts) for k in range(depths)]


def test_the_last_two_tokens_states_and_the_contexts_final_states_are_never_read() -> None:
    whole, n, p = sample(12, 5), 12, 5
    assert whole.final_NH is not None
    features, final = whole.features_NW.clone(), whole.final_NH.clone()
    features[n - 2 :] = torch.nan
    final[:p] = torch.nan
    final[n - 1] = torch.nan
    batch = pack([Sample("s", whole.ids_N, p, features, final)], depths=4)
    assert batch.final_AH is not None
    assert bool(batch.features_MW.isfinite().all())
    assert bool(batch.final_AH.isfinite().all())


def test_an_explicit_mask_replaces_the_rule_and_may_not_train_what_has_no_label() -> None:
    one = sample(8, 5)
    mask = torch.zeros(6, 2, dtype=torch.bool)
    mask[1, 0] = mask[5, 0] = True
    batch = pack([one], 2, masks=[mask])
    assert batch.active_A[0] == 1
    assert batch.mask_AK.nonzero().tolist() == [[0, 0], [4, 0]]
    mask[5, 1] = True
    with pytest.raises(ValueError, match="no label"):
        pack([one], 2, masks=[mask])


def test_a_sample_without_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context"):
        trained_rows(5, 0)
