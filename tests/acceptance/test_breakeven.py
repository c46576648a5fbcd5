"""Break-even: the founding case's figures, what its table misses, and the laws of the arithmetic."""

from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from datagen.acceptance.breakeven import (
    break_even,
    chain_accept_len,
    chain_acceptance,
    geometric_accept_len,
    geometric_acceptance,
    required_accept_len,
    smallest_steps,
)
from datagen.cli import app as cli
from datagen.errors import ConfigError

P = st.floats(0.0, 1.0)
K = st.integers(1, 16)
FOUNDING = ["breakeven", "--baseline", "82", "--cycle-ms", "30", "--targets", "150,200"]


@given(P, P, K)
def test_the_chain_grows_with_acceptance_and_with_steps(p: float, q: float, k: int) -> None:
    low, high = sorted((p, q))
    assert chain_accept_len(low, k) <= chain_accept_len(high, k)
    assert (
        chain_accept_len(p, k)
        <= chain_accept_len(p, k + 1)
        <= geometric_accept_len(p) * (1 + 1e-12)
    )


@given(P, K)
def test_the_chain_stays_between_1_and_its_length(p: float, k: int) -> None:
    assert 1 <= chain_accept_len(p, k) <= k + 1
    assert chain_accept_len(0.0, k) == 1
    assert chain_accept_len(1.0, k) == k + 1


@given(st.floats(0.0, 0.99))
def test_the_chain_tends_to_the_geometric_limit(p: float) -> None:
    assert chain_accept_len(p, 3000) == pytest.approx(geometric_accept_len(p), rel=1e-9)


@given(st.floats(0.01, 1.0), K)
def test_the_inversions_invert(p: float, k: int) -> None:
    assert chain_acceptance(chain_accept_len(p, k), k) == pytest.approx(p, abs=1e-9)
    if p < 0.999:
        assert geometric_acceptance(geometric_accept_len(p)) == pytest.approx(p, abs=1e-9)


@given(st.floats(1.0, 40.0), K)
def test_an_accept_len_has_an_acceptance_exactly_up_to_steps_and_one(a: float, k: int) -> None:
    p = chain_acceptance(a, k)
    assert (p is None) == (a > k + 1)
    if p is not None:
        assert p >= geometric_acceptance(a) - 1e-9, (
            "a finite chain asks for more than an endless one"
        )


@given(st.floats(1.0, 15.0), st.floats(0.5, 0.99))
def test_the_smallest_k_is_the_smallest(a: float, plausible: float) -> None:
    k = smallest_steps(a, plausible)
    if k is None:
        assert geometric_accept_len(plausible) <= a * (1 + 1e-9)
    else:
        assert chain_accept_len(plausible, k) >= a
        assert k == 1 or chain_accept_len(plausible, k - 1) < a


def test_the_founding_cases_table() -> None:
    """Cycle 30 ms, baseline 82: 2.46 / 59 %, 150 -> 4.5 / 78 %, 200 -> 6.0 / 83 %; 2.0 = 50 %."""
    result = break_even(baseline=82, cycle_ms=30, steps=2, targets=(150, 200))
    figures = [
        (round(r.accept_len, 2), round(r.geometric_acceptance, 2)) for r in result.requirements
    ]
    assert figures == [(2.46, 0.59), (4.5, 0.78), (6.0, 0.83)]
    assert geometric_acceptance(2.0) == 0.5
    assert [round(geometric_acceptance(a), 2) for a in (3.2, 3.5)] == [0.69, 0.71]
    assert required_accept_len(82, 30) == pytest.approx(2.46)


def test_what_that_table_misses() -> None:
    result = break_even(
        baseline=82, cycle_ms=30, steps=2, targets=(150, 200),
        measured=((2.0, 2), (2.1, 2), (3.2, 3), (3.5, 3)),
    )  # fmt: skip
    even, first, second = result.requirements
    assert (first.acceptance, second.acceptance) == (None, None), "at most 3 tokens: unreachable"
    assert result.most_tokens_per_s == pytest.approx(100)
    assert even.acceptance == pytest.approx(0.81, abs=0.005)
    assert even.acceptance_by_steps[3] == pytest.approx(0.68, abs=0.005)
    assert (first.smallest_steps, second.smallest_steps) == (4, 6)
    assert first.smallest_steps_acceptance == pytest.approx(0.95, abs=0.005)
    assert [round(m.acceptance, 2) for m in result.measured] == [0.62, 0.66, 0.85, 0.91]
    assert [m.pays for m in result.measured] == [False, False, True, True]
    assert [round(m.at_served_steps, 2) for m in result.measured[2:]] == [2.58, 2.74]
    assert chain_accept_len(0.91, 2) == pytest.approx(2.74, abs=0.01)


def test_a_longer_chain_may_cost_only_so_much_cycle_time() -> None:
    first = break_even(baseline=82, cycle_ms=30, steps=2, targets=(150,)).requirements[1]
    assert first.longest_cycle_ms == pytest.approx(chain_accept_len(0.95, 4) / 150 * 1000)


def test_a_baseline_below_one_token_a_cycle_asks_nothing_of_the_drafter() -> None:
    even = break_even(baseline=20, cycle_ms=30, steps=2).requirements[0]
    assert (even.accept_len, even.acceptance) == (pytest.approx(0.6), pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"baseline": 0.0}, "baseline must be a positive number"),
        ({"cycle_ms": math.nan}, "cycle-ms must be a positive number"),
        ({"targets": (-5.0,)}, "target must be a positive number"),
        ({"steps": 0}, "draft steps must lie in 1..64"),
        ({"measured": ((3.5, 2),)}, "at most 3"),
        ({"measured": ((0.5, 2),)}, "at least 1"),
        ({"plausible": 1.0}, "between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], says: str) -> None:
    given_: dict[str, object] = {"baseline": 82.0, "cycle_ms": 30.0, "steps": 2, **change}
    with pytest.raises(ConfigError, match=says):
        break_even(**given_)  # type: ignore[arg-type]


def test_the_command_prints_the_table_and_the_truth() -> None:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(cli.app, [*FOUNDING, "--steps", "2"])
    assert result.exit_code == 0, result.output
    for text in ("2.46", "59%", "81%", "4.50", "78%", "6.00", "83%", "unreachable", "4 (at 95%)",
                 "6 (at 95%)", "68%", "at most 3 tokens", "150 tok/s is out of reach"):  # fmt: skip
        assert text in result.output, text


def test_the_command_speaks_json() -> None:
    result = CliRunner().invoke(
        cli.app, [*FOUNDING, "--steps", "2", "--json", "--measured", "2.05@2"]
    )
    figures = json.loads(result.output)
    assert figures["requirements"][1]["acceptance"] is None
    assert figures["measured"][0]["pays"] is False
    several = CliRunner().invoke(cli.app, [*FOUNDING, "--json", "--at-batch", "8:45:38"])
    assert [r["batch"] for r in json.loads(several.output)] == [1, 8]


@pytest.mark.parametrize(
    ("more", "says"),
    [(["--targets", "150,x"], "no list of numbers"), (["--measured", "2.0"], "ACCEPT_LEN@K"),
     (["--at-batch", "8"], "BATCH:BASELINE:CYCLE_MS")],
)  # fmt: skip
def test_the_command_names_the_option_that_is_wrong(
    more: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["datagen", *FOUNDING[:5], *more])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert len(lines) == 1
    assert says in lines[0]
