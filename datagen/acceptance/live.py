"""What a live sitting measured: answers of a server with the drafter, beside the same server without.

accept_len       sum(completion_tokens - 1 - num_retractions) / sum(spec_verify_ct)
accept_len_raw   1 + sum(spec_num_correct_drafts) / sum(spec_verify_ct): with drafts accepted
                 beyond the end of outputs
cycle_ms         accept_len / tokens_per_s: the time of a verify step with its share of the prefills, so
                 that accept_len beats the break-even exactly where tokens_per_s beats the baseline
tokens_per_s     of one request: sum of completion tokens / sum of request latencies
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from datagen.acceptance.conditions import require_servers
from datagen.acceptance.metrics import (
    Counts,
    Interval,
    accept_len,
    conditional_acceptance,
    distinct_n,
    slices,
)
from datagen.errors import MeasurementError
from datagen.target.client import Generation

SPECULATIVE, BASELINE = "speculative", "baseline"


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """A rendered prompt. `context_ids` come from the target's chat template."""

    sample_id: str
    prompt_id: str
    context_ids: tuple[int, ...]
    max_new_tokens: int
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request and how long it took, in seconds."""

    prompt: LivePrompt
    generation: Generation
    seconds: float


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts once, on one server, at one concurrency."""

    server: str
    concurrency: int
    wall_s: float
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Visit:
    """Passes made on one server without leaving it, and what the server says of itself.

    environment   settings in its environment; None when they cannot be read from here
    """

    server: str
    url: str
    arguments: dict[str, Any]
    environment: dict[str, str] | None
    passes: tuple[Pass, ...]


@dataclass(frozen=True, slots=True)
class Speed:
    """Figures of one concurrency, over all its passes. Rates in tokens/s.

    speedups   the ratio of every speculative pass to the baseline pass beside it; of a baseline visited
               before and after, to those of either visit
    """

    concurrency: int
    baseline_tokens_per_s: float
    speculative_tokens_per_s: float
    baseline_throughput: float
    speculative_throughput: float
    cycle_ms: float
    speedup: float
    speedups: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What a sitting measured. `counts`: of the speculative passes at the lowest concurrency, once.

    baseline_drift   at the lowest concurrency, the rate of the baseline's last pass / of its first
    """

    servers: dict[str, dict[str, Any]]
    environments: dict[str, dict[str, str] | None]
    accept_len: Interval
    accept_len_raw: float
    speeds: tuple[Speed, ...]
    counts: tuple[Counts, ...]
    outputs: tuple[Answer, ...]
    same_outputs: int
    different: tuple[str, ...]
    """Samples whose greedy texts part: near-ties, or a server that is not lossless."""
    baseline_drift: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; the counts and outputs are left out."""
        return {
            "servers": self.servers,
            "environments": self.environments,
            "accept_len": asdict(self.accept_len),
            "accept_len_raw": self.accept_len_raw,
            "conditional_acceptance": conditional_acceptance(self.counts),
            "slices": {
                name: {value: asdict(i) for value, i in values.items()}
                for name, values in slices(self.counts).items()
            },
            "speeds": [asdict(s) for s in self.speeds],
            "baseline_drift": self.baseline_drift,
            "same_outputs": self.same_outputs,
            "different_outputs": list(self.different),
        }


def require_spec_fields(answers: Sequence[Answer], url: str) -> None:
    """Raise MeasurementError when spec fields are missing, or nothing at all is accepted."""
    longer = [a for a in answers if a.generation.completion_tokens > 1]
    if not longer:
        raise MeasurementError(
            "every answer is one token long, so no verify step ran", where=url,
            fix="allow more tokens",
        )  # fmt: skip
    bare = [a for a in longer if not a.generation.spec_verify_ct]
    if bare:
        raise MeasurementError(
            f"{len(bare)} of {len(longer)} answers hold no spec_verify_ct", where=url,
            fix="the server drops the spec fields of meta_info: use SGLang >= 0.5.17's /generate",
        )  # fmt: skip
    delivered = sum(
        a.generation.completion_tokens - 1 - a.generation.num_retractions for a in longer
    )
    steps = sum(a.generation.spec_verify_ct or 0 for a in longer)
    if delivered == steps:
        raise MeasurementError(
            f"accept_len is 1.0 on all {len(longer)} answers: not one draft was accepted", where=url,
            fix="the usual causes: EAGLE instead of EAGLE3, another target's drafter, a rebuilt "
            "vocabulary map, or boundaries shifted by layers",
        )  # fmt: skip


def counts_of_answer(answer: Answer) -> Counts:
    """A live answer in the terms of the metrics. Depths come from the histogram, uncensored."""
    g = answer.generation
    histogram = g.spec_histogram or ()
    at_least = [sum(histogram[j:]) for j in range(len(histogram) + 1)]
    return Counts(
        sample_id=answer.prompt.sample_id,
        prompt_id=answer.prompt.prompt_id,
        tokens=g.completion_tokens - 1 - g.num_retractions if g.spec_verify_ct else 0,
        steps=g.spec_verify_ct or 0,
        eligible=tuple(at_least[:-1]) if histogram else (),
        accepted=tuple(at_least[1:]) if histogram else (),
        tags=answer.prompt.tags,
        distinct=distinct_n(g.output_ids),
    )


def live_report(visits: Sequence[Visit]) -> LiveReport:
    """The figures of a sitting: visits to the baseline and to the server that drafts, in their order.

    Raises MeasurementError when the servers cannot be compared.
    """
    visit = {name: next(v for v in visits if v.server == name) for name in (BASELINE, SPECULATIVE)}
    for other in visits:
        if other.server == BASELINE:
            require_servers(
                other.arguments, visit[SPECULATIVE].arguments, other.url, visit[SPECULATIVE].url
            )
    passes = [p for v in visits for p in v.passes]
    lowest = min(p.concurrency for p in passes)
    spec = next(p for p in passes if (p.server, p.concurrency) == (SPECULATIVE, lowest))
    plain = next(p for p in passes if (p.server, p.concurrency) == (BASELINE, lowest))
    counts = tuple(counts_of_answer(a) for a in spec.answers)
    steps = sum(c.steps for c in counts)
    correct = sum(a.generation.spec_num_correct_drafts or 0 for a in spec.answers)
    pairs = list(zip(plain.answers, spec.answers, strict=True))
    different = tuple(
        b.prompt.sample_id
        for a, b in pairs
        if not np.array_equal(a.generation.output_ids, b.generation.output_ids)
    )
    return LiveReport(
        servers={name: v.arguments for name, v in visit.items()},
        environments={name: v.environment for name, v in visit.items()},
        accept_len=accept_len(counts),
        accept_len_raw=1 + correct / steps,
        speeds=tuple(_speed(passes, c) for c in sorted({p.concurrency for p in passes})),
        counts=counts,
        outputs=spec.answers,
        same_outputs=len(pairs) - len(different),
        different=different,
        baseline_drift=_drift([p for p in passes if p.server == BASELINE]),
    )


def _drift(passes: Sequence[Pass]) -> float | None:
    """The last rate over the first, at the lowest concurrency; None with one pass."""
    lowest = min(p.concurrency for p in passes)
    rates = [_rate([p]) for p in passes if p.concurrency == lowest]
    return rates[-1] / rates[0] if len(rates) > 1 else None


def _rate(passes: Sequence[Pass]) -> float:
    """Tokens/s of one request."""
    answers = [a for p in passes for a in p.answers]
    tokens = sum(a.generation.completion_tokens for a in answers)
    return tokens / sum(a.seconds for a in answers)


def _speed(passes: Sequence[Pass], concurrency: int) -> Speed:
    here = {
        name: [p for p in passes if (p.server, p.concurrency) == (name, concurrency)]
        for name in (BASELINE, SPECULATIVE)
    }
    plain, drafting = (
        sum(a.generation.completion_tokens for p in mine for a in p.answers)
        / sum(p.wall_s for p in mine)
        for mine in here.values()
    )
    answers = [a for p in here[SPECULATIVE] for a in p.answers]
    steps = sum(a.generation.spec_verify_ct or 0 for a in answers)
    delivered = sum(
        a.generation.completion_tokens - 1 - a.generation.num_retractions for a in answers
    )
    rates = {name: _rate(mine) for name, mine in here.items()}
    spec = here[SPECULATIVE]
    beside = [(spec[i % len(spec)], b) for i, b in enumerate(here[BASELINE])]
    return Speed(
        concurrency=concurrency,
        baseline_tokens_per_s=rates[BASELINE],
        speculative_tokens_per_s=rates[SPECULATIVE],
        baseline_throughput=plain,
        speculative_throughput=drafting,
        cycle_ms=delivered / steps / rates[SPECULATIVE] * 1000,
        speedup=rates[SPECULATIVE] / rates[BASELINE],
        speedups=tuple(_rate([s]) / _rate([b]) for s, b in beside),
    )
