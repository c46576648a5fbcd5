"""States that no healthy engine hands over are refused, and good ones never."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from datagen.errors import ConfigError, StatesFaulty
from datagen.store.guards import (
    FEWEST_FAULTS,
    JUDGED,
    LEARNT_FROM,
    NORM_TOKENS,
    FaultRate,
    Guards,
    NormRange,
    Refused,
    Sound,
    examine,
    row_norms,
)
from tests.store.rows import SPEC, states_like

HIDDEN = SPEC.hidden_size
FAULT = Refused("states_not_finite", "row 3 holds NaN")


def bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16, truncated."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def refused(found: Sound | Refused | None) -> Refused:
    assert isinstance(found, Refused), found
    return found


def norms_of(rows: NDArray[np.uint16]) -> tuple[float, ...]:
    found = examine(rows, len(rows), SPEC)
    assert isinstance(found, Sound), found
    return found.norms


@pytest.mark.parametrize("n_tokens", [1, 2, 17, 3000])
def test_good_states_are_sound_whatever_their_length(n_tokens: int) -> None:
    assert isinstance(examine(states_like(n_tokens), n_tokens, SPEC), Sound)


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("row", [0, 2999])
def test_one_infinity_or_nan_is_found_wherever_it_is(value: int, row: int) -> None:
    rows = states_like(3000)
    rows[row, 2 * HIDDEN + 5] = value
    found = refused(examine(rows, 3000, SPEC))
    assert found.reason == "states_not_finite"
    assert f"boundary 4 holds NaN or infinity in 1 of 3000 rows, first in row {row}" in found.detail


def test_the_largest_finite_values_and_denormals_are_no_fault() -> None:
    rows = states_like(8)
    rows[3, 7], rows[3, 8], rows[4, 9] = 0x7F7F, 0xFF7F, 0x0001
    assert isinstance(examine(rows, 8, SPEC), Sound)


def test_half_precision_has_its_own_infinity() -> None:
    half = replace(SPEC, dtype="F16")
    values = np.random.default_rng(0).standard_normal((8, SPEC.width)).astype(np.float16)
    rows = values.view(np.uint16)
    assert isinstance(examine(rows, 8, half), Sound)
    rows[1, 1] = 0x7C00
    assert refused(examine(rows, 8, half)).reason == "states_not_finite"


@pytest.mark.parametrize(
    ("layer", "rows_changed", "value", "said"),
    [
        (0, slice(None), 0x0000, "boundary 1 is all zero in 9 of 9 rows"),
        (3, slice(4, 5), 0x8000, "the final state is all zero in 1 of 9 rows, first in row 4"),
        (2, slice(7, 9), 0x3F80, "boundary 4 is one value in every channel in 2 of 9 rows"),
    ],
)
def test_rows_that_were_never_filled_are_found(
    layer: int, rows_changed: slice, value: int, said: str
) -> None:
    rows = states_like(9)
    rows[rows_changed, layer * HIDDEN : (layer + 1) * HIDDEN] = value
    found = refused(examine(rows, 9, SPEC))
    assert found.reason == "states_constant"
    assert said in found.detail


def test_one_row_repeated_over_the_whole_sample_is_found_but_a_few_are_not() -> None:
    rows = states_like(9)
    rows[5:7, :HIDDEN] = rows[4, :HIDDEN]  # a token said thrice
    assert isinstance(examine(rows, 9, SPEC), Sound)
    rows[:, :HIDDEN] = rows[4, :HIDDEN]
    assert "boundary 1 is the same for all 9 tokens" in refused(examine(rows, 9, SPEC)).detail


def test_an_embedding_may_be_zero() -> None:
    spec = replace(SPEC, boundaries=(0, 3, 4))
    rows = states_like(9)
    rows[2, :HIDDEN] = 0
    assert isinstance(examine(rows, 9, spec), Sound)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (states_like(9)[:-1], "states_rows"),
        (states_like(9)[0], "states_rows"),
        (states_like(9)[:, :HIDDEN], "states_width"),
        (states_like(9).astype(np.int64), "states_dtype"),
    ],
)
def test_another_shape_or_type_is_refused(rows: NDArray[np.uint16], reason: str) -> None:
    assert refused(examine(rows, 9, SPEC)).reason == reason


def test_a_dtype_that_cannot_be_stored_stops_the_run_before_it_begins() -> None:
    with pytest.raises(ConfigError, match="F32 cannot be stored"):
        Guards(replace(SPEC, dtype="F32"), max_fault_rate=0.05)


def test_norms_are_those_of_the_values() -> None:
    rows = states_like(NORM_TOKENS, massive=False)
    values = (rows.astype(np.uint32) << 16).view(np.float32).reshape(-1, SPEC.n_layers, HIDDEN)
    expected = np.linalg.norm(values.astype(np.float64), axis=2)
    np.testing.assert_allclose(row_norms(rows.reshape(values.shape), "BF16"), expected, rtol=1e-5)
    np.testing.assert_allclose(norms_of(rows), np.median(expected, axis=0), rtol=1e-5)


@pytest.mark.parametrize("scale", [2.0**80, 2.0**-80])
def test_norms_beyond_float32s_squares_are_exact_too(scale: float) -> None:
    values = np.full((2, SPEC.n_layers, HIDDEN), scale, dtype=np.float32)
    found = row_norms((values.view(np.uint32) >> 16).astype(np.uint16), "BF16")
    np.testing.assert_allclose(found, scale * np.sqrt(HIDDEN), rtol=1e-5)


def learnt(seed: int = 0) -> NormRange:
    judge = NormRange(SPEC)
    for number in range(LEARNT_FROM):
        assert judge.judge(norms_of(states_like(40, seed=seed + number))) is None
    return judge


@pytest.mark.parametrize("scale", [1 / 64, 1 / 8, 8, 64])
def test_a_boundary_on_another_scale_is_refused_once_the_run_is_known(scale: float) -> None:
    values = (states_like(40, seed=99).astype(np.uint32) << 16).view(np.float32).copy()
    values[:, HIDDEN : 2 * HIDDEN] *= scale
    judge, other = learnt(), norms_of(bits(values))
    found = refused(judge.judge(other))
    assert found.reason == "norm_out_of_range"
    assert "boundary 3" in found.detail
    assert judge.judge(norms_of(states_like(40, seed=100))) is None, "and good ones still fit"
    assert refused(judge.judge(other)), "what was refused is not learnt from"


def test_attention_sinks_do_not_count() -> None:
    judge = learnt()
    rows = states_like(40, seed=5)
    sinks = rows.reshape(40, SPEC.n_layers, HIDDEN)
    sinks[:4, :, 3] = bits(np.full(1, 25_000.0, np.float32))[0]  # thousands of times the rest
    assert judge.judge(norms_of(rows)) is None


def test_nothing_is_refused_before_the_run_is_known() -> None:
    judge = NormRange(SPEC)
    rng = np.random.default_rng(4)
    for _ in range(LEARNT_FROM):
        assert judge.judge(tuple(rng.lognormal(3, 3, SPEC.n_layers))) is None


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e5), min_size=4, max_size=4),
    st.floats(0.0, 0.35),
    st.integers(0, 2**32 - 1),
)
def test_samples_of_one_distribution_are_never_refused(
    middle: list[float], spread: float, seed: int
) -> None:
    judge, rng = NormRange(SPEC), np.random.default_rng(seed)
    for _ in range(300):
        norms = np.array(middle) * np.exp(spread * rng.standard_normal(4))
        assert judge.judge(tuple(norms.tolist())) is None


def test_equal_norms_leave_room_for_others() -> None:
    judge = NormRange(SPEC)
    for _ in range(100):
        assert judge.judge((1.0, 2.0, 3.0, 4.0)) is None
    assert judge.judge((1.5, 1.5, 4.0, 4.1)) is None


def test_an_engine_that_only_gives_faults_stops_the_run_soon_and_is_named() -> None:
    rate = FaultRate(0.05)
    for _ in range(FEWEST_FAULTS - 1):
        rate.refused(FAULT, "http://a")
    with pytest.raises(StatesFaulty) as error:
        rate.refused(FAULT, "http://a")
    text = str(error.value)
    assert f"{FEWEST_FAULTS} of the last {FEWEST_FAULTS} captures were refused" in text
    for part in (FAULT.reason, "row 3 holds NaN", f"http://a: {FEWEST_FAULTS} of", "bfloat16"):
        assert part in text
    assert "\n" not in text


def test_one_bad_server_of_three_is_named_with_its_share() -> None:
    rate = FaultRate(0.05)
    bad = Refused("norm_out_of_range", "boundary 3")
    for _ in range(FEWEST_FAULTS - 1):
        for server in ("http://a", "http://b"):
            rate.accepted(server)
        rate.refused(bad, "http://bad")
    with pytest.raises(StatesFaulty, match=r"http://bad: 8 of 8"):
        rate.refused(bad, "http://bad")


def test_rare_faults_do_not_stop_a_run_and_old_ones_are_forgotten() -> None:
    rate = FaultRate(0.05)
    for number in range(4000):
        if number % 40 == 0:
            rate.refused(FAULT, "http://a")
        else:
            rate.accepted("http://a")
    for _ in range(JUDGED):
        rate.accepted("http://a")
    for _ in range(int(JUDGED * 0.04)):
        rate.refused(FAULT, "http://a")


def test_a_sample_counts_once_however_often_it_is_captured() -> None:
    guards = Guards(SPEC, max_fault_rate=0.05)
    for _ in range(100):
        assert guards.judge(FAULT, "http://a", first=False) == FAULT
    sound = Sound((1.0, 2.0, 3.0, 4.0))
    assert guards.judge(FAULT, "http://a", first=True) == FAULT
    assert guards.judge(sound, "http://b", first=False) is None
