"""accept_len and its relatives: one definition each, with intervals over prompts.

    accept_len      tokens delivered by verify steps / verify steps, as sum / sum over samples
    a_j             P(draft j accepted | drafts before it were), over steps where token j exists to
                    compare with; steps cut by the end of the output are censored, not failures
    accept_len_raw  also counts drafts accepted beyond the end of an output; a live engine alone
                    knows it

A sample without a verify step adds nothing. Intervals come from the bootstrap over prompts (samples of
one prompt are not independent), of the ratio of sums, at percentiles widened for small n: Hesterberg,
"What Teachers Should Know About the Bootstrap" (2015), section 5.3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from datagen.errors import MeasurementError

RESAMPLES = 2000
LEVEL = 0.95
BLOCK = 1 << 19  # drawn prompts held at once
LOOPING = 0.5  # a response with fewer distinct 4-grams than this repeats itself
LENGTH_EDGES = (16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Counts:
    """What the verify steps of one sample did.

    tokens      delivered by verify steps: R - 1 of R response tokens, less what retractions added
    eligible    per draft position, steps in which the token to compare with exists and all drafts
                before it were accepted
    accepted    per draft position, those of them in which this draft was accepted too
    tags        slice -> value, e.g. source, category, language
    distinct    share of distinct 4-grams in the response
    """

    sample_id: str
    prompt_id: str
    tokens: int
    steps: int
    eligible: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    distinct: float = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval. `low` and `high` are None with fewer than two prompts."""

    value: float
    low: float | None
    high: float | None
    n_prompts: int

    @property
    def half_width(self) -> float | None:
        """Half the interval's length."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} (no interval: {self.n_prompts} prompt)"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A on the same prompts: `difference` = accept_len of B - accept_len of A."""

    difference: Interval
    verdict: Literal["better", "worse", "no difference shown"]

    def __str__(self) -> str:
        d = self.difference
        if self.verdict == "no difference shown" or d.half_width is None:
            return f"no difference shown: {d}"
        return f"{self.verdict} by {abs(d.value):.2f} +- {d.half_width:.2f}"


def accept_len(samples: Iterable[Counts], *, seed: int = 0) -> Interval:
    """sum(tokens) / sum(steps) with its interval. Raises MeasurementError where no step ran."""
    tokens, steps, _ = _per_prompt(samples)
    return _interval(_ratio, np.stack([tokens, steps]), seed)


def compare(a: Iterable[Counts], b: Iterable[Counts], *, seed: int = 0) -> Comparison:
    """Two drafters on the same samples, paired by prompt. Raises MeasurementError unless they are."""
    tokens_a, steps_a, prompts_a = _per_prompt(a)
    tokens_b, steps_b, prompts_b = _per_prompt(b)
    if prompts_a != prompts_b:
        only = sorted(set(prompts_a) ^ set(prompts_b))
        raise MeasurementError(
            f"the two measurements are not of the same prompts: {len(only)} stand in one alone",
            where=only[0],
            fix="evaluate both drafters on the same held-out split",
        )

    def difference(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        return _ratio(sums[2:]) - _ratio(sums[:2])

    found = _interval(difference, np.stack([tokens_a, steps_a, tokens_b, steps_b]), seed)
    verdict: Literal["better", "worse", "no difference shown"] = "no difference shown"
    if found.low is not None and found.low > 0:
        verdict = "better"
    elif found.high is not None and found.high < 0:
        verdict = "worse"
    return Comparison(found, verdict)


def conditional_acceptance(samples: Iterable[Counts]) -> list[float | None]:
    """a_j of each draft position, over the steps visited; None where no step was eligible."""
    rows = [s for s in samples if s.eligible]
    depth = max((len(s.eligible) for s in rows), default=0)
    eligible = [sum(s.eligible[j] for s in rows if j < len(s.eligible)) for j in range(depth)]
    accepted = [sum(s.accepted[j] for s in rows if j < len(s.accepted)) for j in range(depth)]
    return [a / e if e else None for a, e in zip(accepted, eligible, strict=True)]


def predicted_accept_len(conditional: Sequence[float | None]) -> float:
    """1 + sum over depths of the product of a_i: what uncut steps deliver on average."""
    total, alive = 1.0, 1.0
    for a in conditional:
        alive *= a or 0.0
        total += alive
    return total


def slices(samples: Sequence[Counts], *, seed: int = 0) -> dict[str, dict[str, Interval]]:
    """accept_len per value of every tag, each with its own interval; values without a step left out."""
    groups: dict[str, dict[str, list[Counts]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        for name, value in sample.tags.items():
            groups[name][value].append(sample)
    return {
        name: {
            value: accept_len(group, seed=seed)
            for value, group in sorted(values.items())
            if any(s.steps for s in group)
        }
        for name, values in sorted(groups.items())
    }


def distinct_n(ids: Sequence[int] | NDArray[Any], n: int = 4) -> float:
    """Distinct n-grams / n-grams of one response: 1 without repetition; 1 when shorter than n."""
    tokens = [int(i) for i in ids]
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def looping_share(samples: Iterable[Counts]) -> float:
    """Share of samples that repeat themselves: loops are easy to draft, and inflate accept_len."""
    rows = list(samples)
    return sum(s.distinct < LOOPING for s in rows) / len(rows) if rows else 0.0


def length_tag(response_tokens: int) -> str:
    """The length class of a response, e.g. `64-255`; its text sorts by length."""
    low = max((e for e in LENGTH_EDGES if e <= response_tokens), default=0)
    high = min((e for e in LENGTH_EDGES if e > response_tokens), default=None)
    return f"{low:04d}-{high - 1:04d}" if high else f"{low:04d} and more"


def _per_prompt(
    samples: Iterable[Counts],
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    """Sums of tokens and steps by prompt, in order of prompt id; prompts without a step left out."""
    sums: dict[str, list[int]] = {}
    for sample in samples:
        pair = sums.setdefault(sample.prompt_id, [0, 0])
        if sample.steps:
            pair[0] += sample.tokens
            pair[1] += sample.steps
    kept = {p: pair for p, pair in sorted(sums.items()) if pair[1]}
    if not kept:
        raise MeasurementError(
            f"none of {len(sums)} prompts ran a verify step, so there is no accept_len",
            fix="measure on responses longer than one token",
        )
    table = np.array(list(kept.values()), dtype=np.float64)
    return table[:, 0], table[:, 1], list(kept)


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(sums[0] / sums[1])


def _interval(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    table_CN: NDArray[np.float64],
    seed: int,
) -> Interval:
    """`statistic` of the column sums [C, ...] of the N prompts, bootstrapped over the prompts."""
    n = table_CN.shape[1]
    value = float(statistic(table_CN.sum(axis=1)))
    if n < 2:
        return Interval(value, None, None, n)
    generator = np.random.default_rng(seed)
    block = max(1, BLOCK // n)
    sums = []
    for start in range(0, RESAMPLES, block):
        drawn = generator.integers(0, n, (min(block, RESAMPLES - start), n), dtype=np.uint32)
        sums.append(np.stack([column.take(drawn).sum(axis=1) for column in table_CN]))
    found = statistic(np.concatenate(sums, axis=1))
    tail = NormalDist().cdf(-student_t((1 + LEVEL) / 2, n - 1) * math.sqrt(n / (n - 1)))
    low, high = np.quantile(found, [tail, 1 - tail])
    return Interval(value, float(low), float(high), n)


def student_t(probability: float, freedom: int) -> float:
    """Quantile of Student's t, by bisection on its exact distribution function."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, freedom) < probability else (low, middle)
    return low


def _t_cdf(t: float, freedom: int) -> float:
    """P(T <= t), t >= 0: the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if freedom > 300:  # the normal with the variance of t: within 1e-5
        return NormalDist().cdf(t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)))
    theta = math.atan(t / math.sqrt(freedom))
    cos2 = math.cos(theta) ** 2
    term, total = 1.0, 1.0
    start = 3 if freedom % 2 else 2
    for k in range(start, freedom - 1, 2):
        term *= (k - 1) / k * cos2
        total += term
    if freedom % 2 == 0:
        return (1 + math.sin(theta) * total) / 2
    if freedom == 1:
        return 0.5 + theta / math.pi
    return 0.5 + (theta + math.sin(theta) * math.cos(theta) * total) / math.pi
