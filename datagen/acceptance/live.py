"""accept_len and speed on a live server, beside the same server without a drafter, in one sitting.

Baseline and speculative passes alternate (B S S B ...) over the same rendered prompts, so that a warming
machine or a busy neighbour falls on both. A baseline of another day is no baseline.

    accept_len       sum(completion_tokens - 1 - num_retractions) / sum(spec_verify_ct)
    accept_len_raw   1 + sum(spec_num_correct_drafts) / sum(spec_verify_ct): with drafts accepted
                     beyond the end of outputs
    cycle_ms         sum of request latencies / sum(spec_verify_ct); the prefill's share is in it
    tokens_per_s     of one request: sum of completion tokens / sum of request latencies
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from datagen.acceptance.metrics import Counts, Interval, accept_len, distinct_n
from datagen.errors import MeasurementError
from datagen.target.client import Generation, SGLangClient
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure
from datagen.target.profile import Sampling

ARGUMENTS = (
    "engine", "version", "model_path", "served_model_name", "revision", "dtype", "tp_size",
    "dp_size", "quantization", "kv_cache_dtype", "attention_backend", "chunked_prefill_size",
    "disable_radix_cache", "max_running_requests", "context_length", "speculative_algorithm",
    "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_draft_window_size",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
)  # fmt: skip
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
class Speed:
    """Figures of one concurrency, over all its passes. Rates in tokens/s."""

    concurrency: int
    baseline_tokens_per_s: float
    speculative_tokens_per_s: float
    baseline_throughput: float
    speculative_throughput: float
    cycle_ms: float
    speedup: float


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What a sitting measured. `counts`: of the speculative passes at the lowest concurrency, once."""

    servers: dict[str, dict[str, Any]]
    accept_len: Interval
    accept_len_raw: float
    speeds: tuple[Speed, ...]
    counts: tuple[Counts, ...]
    outputs: tuple[Answer, ...]
    same_outputs: int
    different: tuple[str, ...]
    """Samples whose greedy texts part: near-ties, or a server that is not lossless."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; the counts and outputs are left out."""
        return {
            "servers": self.servers,
            "accept_len": asdict(self.accept_len),
            "accept_len_raw": self.accept_len_raw,
            "speeds": [asdict(s) for s in self.speeds],
            "same_outputs": self.same_outputs,
            "different_outputs": list(self.different),
        }


async def measure(
    baseline_url: str,
    speculative_url: str,
    prompts: Sequence[LivePrompt],
    *,
    stop_token_ids: Sequence[int],
    concurrencies: Sequence[int] = (1,),
    rounds: int = 2,
    sampling: Sampling | None = None,
) -> LiveReport:
    """Run the sitting. Raises MeasurementError when what is served cannot mean what is asked."""
    if not prompts:
        raise MeasurementError("no prompts to measure on")
    asked = _Asked(tuple(prompts), tuple(stop_token_ids), sampling or Sampling(temperature=0.0))
    async with SGLangClient(baseline_url) as plain, SGLangClient(speculative_url) as drafting:
        servers = {
            BASELINE: _known(await plain.server_info()),
            SPECULATIVE: _known(await drafting.server_info()),
        }
        require_servers(servers[BASELINE], servers[SPECULATIVE], baseline_url, speculative_url)
        clients = {BASELINE: plain, SPECULATIVE: drafting}
        for name, client in clients.items():  # warm up: the first request pays for lazy starts
            await _pass(name, client, asked.first(), 1)
        passes: list[Pass] = []
        for concurrency in sorted(set(concurrencies)):
            for number in range(rounds):
                order = (BASELINE, SPECULATIVE) if number % 2 == 0 else (SPECULATIVE, BASELINE)
                for name in order:
                    passes.append(await _pass(name, clients[name], asked, concurrency))
                    if name == SPECULATIVE:
                        require_spec_fields(passes[-1].answers, speculative_url)
    return _report(servers, passes)


def require_servers(
    baseline: Mapping[str, Any], speculative: Mapping[str, Any], baseline_url: str, url: str
) -> None:
    """Raise MeasurementError unless one server drafts with EAGLE3, losslessly, and the other not."""
    algorithm = speculative.get("speculative_algorithm")
    if algorithm == "EAGLE":
        raise MeasurementError(
            "the server was started with --speculative-algorithm EAGLE: it feeds the drafter the "
            "final state in place of the boundaries, and accepts nothing",
            where=url,
            fix="start it with --speculative-algorithm EAGLE3",
        )
    if algorithm != "EAGLE3":
        raise MeasurementError(
            f"the server speculates with {algorithm or 'nothing'}, not EAGLE3",
            where=url,
            fix="start it with --speculative-algorithm EAGLE3 and the drafter",
        )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if speculative.get(name) not in (None, 1, 1.0):
            raise MeasurementError(
                f"{name} is {speculative[name]}: decoding is lossy, and its accept_len no measure",
                where=url,
                fix="leave it at 1.0",
            )
    if baseline.get("speculative_draft_model_path") or (
        baseline.get("speculative_algorithm") and baseline.get("speculative_num_steps")
    ):
        raise MeasurementError(
            "the baseline server drafts too", where=baseline_url,
            fix="start it without --speculative-draft-model-path",
        )  # fmt: skip
    for name in ("model_path", "dtype", "quantization", "tp_size"):
        if baseline.get(name) != speculative.get(name):
            raise MeasurementError(
                f"{name} is {speculative.get(name)} with the drafter, {baseline.get(name)} without",
                where=baseline_url,
                fix="compare servers that differ in the drafter alone",
            )


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


@dataclass(frozen=True, slots=True)
class _Asked:
    prompts: tuple[LivePrompt, ...]
    stop_token_ids: tuple[int, ...]
    sampling: Sampling

    def first(self) -> _Asked:
        return _Asked(self.prompts[:1], self.stop_token_ids, self.sampling)


async def _pass(name: str, client: SGLangClient, asked: _Asked, concurrency: int) -> Pass:
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: LivePrompt) -> Answer:
        async with gate:
            started = time.monotonic()
            try:
                generation = await client.generate(
                    prompt.context_ids, rid=uuid.uuid4().hex, sampling=asked.sampling,
                    max_new_tokens=prompt.max_new_tokens, stop_token_ids=asked.stop_token_ids,
                    seed=0,
                )  # fmt: skip
            except (RowFailure, CapacityFailure, EndpointFailure) as e:
                raise MeasurementError(
                    f"sample {prompt.sample_id[:16]} failed on the {name} server: {e}",
                    where=client.url, fix="see the server's log",
                ) from e  # fmt: skip
            return Answer(prompt, generation, time.monotonic() - started)

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(p)) for p in asked.prompts]
    return Pass(name, concurrency, time.monotonic() - started, tuple(t.result() for t in tasks))


def _report(servers: dict[str, dict[str, Any]], passes: Sequence[Pass]) -> LiveReport:
    lowest = passes[0].concurrency
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
        servers=servers,
        accept_len=accept_len(counts),
        accept_len_raw=1 + correct / steps,
        speeds=tuple(_speed(passes, c) for c in sorted({p.concurrency for p in passes})),
        counts=counts,
        outputs=spec.answers,
        same_outputs=len(pairs) - len(different),
        different=different,
    )


def _speed(passes: Sequence[Pass], concurrency: int) -> Speed:
    rates, throughputs = {}, {}
    cycle = 0.0
    for name in (BASELINE, SPECULATIVE):
        mine = [p for p in passes if (p.server, p.concurrency) == (name, concurrency)]
        answers = [a for p in mine for a in p.answers]
        tokens = sum(a.generation.completion_tokens for a in answers)
        seconds = sum(a.seconds for a in answers)
        rates[name] = tokens / seconds
        throughputs[name] = tokens / sum(p.wall_s for p in mine)
        steps = sum(a.generation.spec_verify_ct or 0 for a in answers)
        cycle = seconds / steps * 1000 if steps else cycle
    return Speed(
        concurrency, rates[BASELINE], rates[SPECULATIVE], throughputs[BASELINE],
        throughputs[SPECULATIVE], cycle, rates[SPECULATIVE] / rates[BASELINE],
    )  # fmt: skip


def _known(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in ARGUMENTS if name in info}
