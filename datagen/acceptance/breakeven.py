"""Break-even: what a drafter must reach before it pays, by arithmetic alone.

    tokens/s per request = accept_len / cycle time        (a cycle: draft, verify, extend)
    required accept_len  = wanted tokens/s x cycle time

With conditional acceptance p at every depth and K draft steps a cycle delivers
    chain(p, K) = 1 + p + ... + p^K = (1 - p^(K+1)) / (1 - p),     at most K + 1
whose limit for an endless chain is 1 / (1 - p). The limit is what is usually quoted; it promises rates
that K steps cannot reach at any accuracy, and makes measured drafters look less accurate than they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from datagen.errors import ConfigError

PLAUSIBLE = 0.95
"""Conditional acceptance taken as the most a drafter reaches, where a smallest K is asked for."""
MOST_STEPS = 64
SHOWN_STEPS = range(1, 9)


def chain_accept_len(p: float, steps: int) -> float:
    """Tokens per cycle of `steps` drafts, each accepted with probability `p` given the one before."""
    return math.fsum(p**i for i in range(steps + 1))


def chain_acceptance(accept_len: float, steps: int) -> float | None:
    """The p at which `steps` drafts give `accept_len`; None above steps + 1. Inverse of the chain."""
    _check(accept_len, steps)
    if accept_len > steps + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if chain_accept_len(middle, steps) < accept_len else (low, middle)
        )
    return high


def geometric_accept_len(p: float) -> float:
    """Tokens per cycle of an endless chain: 1 / (1 - p)."""
    return math.inf if p >= 1 else 1 / (1 - p)


def geometric_acceptance(accept_len: float) -> float:
    """The p at which an endless chain gives `accept_len`: 1 - 1 / accept_len."""
    _check(accept_len, 1)
    return 1 - 1 / accept_len


def within_chain(accept_len: float, steps: int) -> float:
    """What K = `steps` drafts can have measured: an estimate kept between 1 and steps + 1."""
    return min(max(accept_len, 1.0), steps + 1.0)


def required_accept_len(tokens_per_s: float, cycle_ms: float) -> float:
    """What every cycle must deliver on average for `tokens_per_s`."""
    return tokens_per_s * cycle_ms / 1000


@dataclass(frozen=True, slots=True)
class Requirement:
    """What one rate takes at one cycle time. `acceptance`: of the served K, None if unreachable.

    smallest_steps  the fewest drafts that reach it at `plausible` acceptance; None if none does
    longest_cycle_ms   the cycle time that K may cost before the rate is lost, at `plausible`
    acceptance_by_steps   for K of SHOWN_STEPS
    """

    name: str
    tokens_per_s: float
    accept_len: float
    geometric_acceptance: float
    acceptance: float | None
    smallest_steps: int | None
    smallest_steps_acceptance: float | None
    longest_cycle_ms: float | None
    acceptance_by_steps: dict[int, float | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured accept_len at its own K, and what that accuracy gives at the served K.

    `pays` compares with the baseline at the served K and cycle time.
    """

    accept_len: float
    steps: int
    geometric_acceptance: float
    acceptance: float
    at_served_steps: float
    tokens_per_s: float
    pays: bool


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The arithmetic at one batch size. Rates are tokens/s per request."""

    batch: int
    baseline: float
    cycle_ms: float
    steps: int
    plausible: float
    most_tokens_per_s: float
    requirements: tuple[Requirement, ...]
    measured: tuple[Measured, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; K as a string where it is a key."""
        plain = asdict(self)
        for requirement in plain["requirements"]:
            by_steps = requirement["acceptance_by_steps"]
            requirement["acceptance_by_steps"] = {str(k): p for k, p in by_steps.items()}
        return plain


def break_even(
    *,
    baseline: float,
    cycle_ms: float,
    steps: int,
    targets: Sequence[float] = (),
    measured: Sequence[tuple[float, int]] = (),
    plausible: float = PLAUSIBLE,
    batch: int = 1,
) -> BreakEven:
    """What `baseline` tokens/s, and each target rate, ask of a drafter. Raises ConfigError.

    cycle_ms   time of one verify cycle with the drafter, at K = `steps`
    measured   (accept_len, the K it was measured at)
    """
    for name, value in (("baseline", baseline), ("cycle-ms", cycle_ms), ("batch", batch),
                        *(("target", t) for t in targets)):  # fmt: skip
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be a positive number, got {value:g}")
    if not 0 < plausible < 1:
        raise ConfigError(f"the most plausible acceptance lies between 0 and 1, got {plausible:g}")
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"draft steps must lie in 1..{MOST_STEPS}, got {steps}")
    rates = [("break-even", baseline), *((f"{t:g} tok/s", t) for t in targets)]
    return BreakEven(
        batch=batch,
        baseline=baseline,
        cycle_ms=cycle_ms,
        steps=steps,
        plausible=plausible,
        most_tokens_per_s=(steps + 1) / cycle_ms * 1000,
        requirements=tuple(_requirement(n, r, cycle_ms, steps, plausible) for n, r in rates),
        measured=tuple(_measured(a, k, baseline, cycle_ms, steps) for a, k in measured),
    )


def smallest_steps(accept_len: float, plausible: float = PLAUSIBLE) -> int | None:
    """The fewest drafts that give `accept_len` at `plausible` acceptance; None when none do."""
    counts = range(1, MOST_STEPS + 1)
    return next((k for k in counts if chain_accept_len(plausible, k) >= accept_len), None)


def _requirement(
    name: str, rate: float, cycle_ms: float, steps: int, plausible: float
) -> Requirement:
    needed = required_accept_len(rate, cycle_ms)
    at_least_one = max(needed, 1.0)  # a cycle delivers one token whatever the drafter does
    fewest = smallest_steps(at_least_one, plausible)
    return Requirement(
        name=name,
        tokens_per_s=rate,
        accept_len=needed,
        geometric_acceptance=geometric_acceptance(at_least_one),
        acceptance=chain_acceptance(at_least_one, steps),
        smallest_steps=fewest,
        smallest_steps_acceptance=chain_acceptance(at_least_one, fewest) if fewest else None,
        longest_cycle_ms=chain_accept_len(plausible, fewest) / rate * 1000 if fewest else None,
        acceptance_by_steps={k: chain_acceptance(at_least_one, k) for k in SHOWN_STEPS},
    )


def _measured(
    accept_len: float, at_steps: int, baseline: float, cycle_ms: float, steps: int
) -> Measured:
    p = chain_acceptance(accept_len, at_steps)
    if p is None:
        raise ConfigError(
            f"accept_len {accept_len:g} cannot be measured with {at_steps} draft steps, which give at "
            f"most {at_steps + 1}",
            fix="name the draft steps it was measured with: ACCEPT_LEN@STEPS",
        )
    served = chain_accept_len(p, steps)
    rate = served / cycle_ms * 1000
    return Measured(
        accept_len, at_steps, geometric_acceptance(accept_len), p, served, rate, rate > baseline
    )


def _check(accept_len: float, steps: int) -> None:
    if not accept_len >= 1:
        raise ConfigError(f"accept_len is at least 1 by definition, got {accept_len:g}")
    if steps < 1:
        raise ConfigError(f"draft steps must be at least 1, got {steps}")
