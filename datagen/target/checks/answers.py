"""Checks of answers: the same in company, ended by a stop token; and how fast they come."""

from __future__ import annotations

from datagen.target.checks.probes import Answer, Evidence
from datagen.target.checks.states import CLEAR_GAP
from datagen.target.checks.subject import Subject
from datagen.target.checks.verdict import Finding, Skipped, Speeds, ok, red
from datagen.target.failures import RequestFailure

LOG_FIX = "see the server's log; it must answer /generate with input_ids and return_logprob"


def check_generates(subject: Subject, found: Evidence) -> Finding:
    """Every question is answered."""
    asked = [found.alone, found.stopped, *found.company]
    failed = [a for a in asked if isinstance(a, RequestFailure)]
    expected = "every question is answered"
    if failed:
        return red(f"{len(failed)} of {len(asked)} failed: {failed[0]}", expected, LOG_FIX)
    return ok(f"{len(asked)} answers", expected)


def check_parity(subject: Subject, found: Evidence) -> Finding:
    """The greedy answer in a batch is the answer alone, but for near ties."""
    alone = found.alone
    beside = found.company[0] if found.company else None
    if not isinstance(alone, Answer) or not isinstance(beside, Answer):
        raise Skipped("it was not answered: see `generates`")
    expected = f"the same tokens, up to a tie within {2 * CLEAR_GAP} nats"
    among = f"among {len(found.company)}"
    for place, (one, other) in enumerate(zip(alone.output_ids, beside.output_ids, strict=False)):
        if one == other:
            continue
        scores = {i: s for s, i in (alone.top[place] if place < len(alone.top) else [])}
        gap = scores.get(one, 0.0) - scores.get(other, float("-inf"))
        if gap <= 2 * CLEAR_GAP:
            return ok(f"{place} tokens, then a tie of {gap:.3f} nats, {among}", expected)
        return red(
            f"token {place} is {other} {among} and {one} alone, {gap:.2f} nats apart",
            expected,
            "the engine mixes up requests of a batch, or its kernels are wrong here: try another "
            "--attention-backend, without --enable-mixed-chunk",
        )
    return ok(f"{min(len(alone.output_ids), len(beside.output_ids))} tokens, {among}", expected)


def check_stop_token(subject: Subject, found: Evidence) -> Finding:
    """A stop token ends an answer, is part of it, and ends the turns of the template."""
    expected = "the stop token ends the answer and is its last id; the template writes it"
    stops = set(subject.profile.stop_token_ids)
    if stops_written(subject, found, "several turns") <= stops_written(subject, found, "one turn"):
        return red(
            f"no stop token {sorted(stops)} follows an assistant's turn in the template",
            expected,
            "correct stop_token_ids in the profile: the ids that end an assistant's turn",
        )
    said = found.stopped
    if not isinstance(said, Answer) or not isinstance(found.alone, Answer) or found.stop_at is None:
        raise Skipped("it was not answered: see `generates`")
    token = found.alone.output_ids[found.stop_at]
    if said.finish.get("type") != "stop" or said.finish.get("matched") != token:
        return red(
            f"asked to stop at token {token}, it ended with {said.finish}",
            expected,
            "start the server with its tokenizer, without --skip-tokenizer-init",
        )
    trimmed = said.output_ids[-1:] != [token]
    return ok(
        f"ended by {token}" + (", trimmed by the engine, put back here" if trimmed else ""),
        expected,
    )


def stops_written(subject: Subject, found: Evidence, name: str) -> int:
    """Stop tokens in the context of a conversation, the server's where it tells. Raises Skipped."""
    rendered = found.rendered[name]
    ids = rendered.told or rendered.ours
    if isinstance(ids, str):
        raise Skipped(f"nothing is rendered: {ids}")
    return sum(i in subject.profile.stop_token_ids for i in ids)


def speeds(found: Evidence) -> Speeds | None:
    """Tokens per second of the probes, or None where they failed."""
    said = [a for a in found.company if isinstance(a, Answer)]
    if not said or not found.company_s or not found.capture_s:
        return None
    return Speeds(
        generate_tokens_per_s=round(sum(len(a.output_ids) for a in said) / found.company_s, 1),
        prefill_tokens_per_s=round(found.captured_tokens / found.capture_s, 1),
        concurrency=len(said),
    )


def check_throughput(subject: Subject, found: Evidence) -> Finding:
    """Not judged: figures for `datagen plan`."""
    measured = speeds(found)
    if measured is None:
        raise Skipped("the probes failed")
    return ok(
        f"{measured.generate_tokens_per_s:,.0f} generated tok/s with {measured.concurrency} requests, "
        f"{measured.prefill_tokens_per_s:,.0f} prefilled tok/s with capture",
        "a figure for `datagen plan --speeds`; short probes understate a large server",
    )
