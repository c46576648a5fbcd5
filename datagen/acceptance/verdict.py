"""One sentence: does this drafter pay?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from datagen.acceptance.breakeven import chain_acceptance, required_accept_len, smallest_steps
from datagen.acceptance.live import Speed
from datagen.acceptance.metrics import Interval

Answer = Literal["pays", "does not pay", "undecided", "unknown"]


IMPLAUSIBLE = 0.9
"""A verify cycle reads what a plain step reads, and more: below this share of it something else differs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, the sentence, and what to do next."""

    answer: Answer
    sentence: str
    next_step: str


def judged(
    found: Interval, *, steps: int, baseline: float | None = None, cycle_ms: float | None = None,
    measured: Speed | None = None,
) -> Verdict:  # fmt: skip
    """From an accept_len at K = `steps`, and a baseline in tokens/s with a cycle time, or a sitting.

    A sitting's own rates decide where there is one; else accept_len's interval against break-even.
    """
    if measured is not None:
        baseline, cycle_ms = measured.baseline_tokens_per_s, measured.cycle_ms
    if baseline is None or cycle_ms is None:
        return Verdict(
            "unknown",
            f"accept_len is {found} on {found.n_prompts} held-out prompts at K = {steps}; whether "
            "that pays depends on the server.",
            "Measure a server (--live and --baseline-url), or give --baseline and --cycle-ms.",
        )
    if measured is not None and cycle_ms < IMPLAUSIBLE * 1000 / baseline:
        return _unbelievable(found, measured)
    needed = required_accept_len(baseline, cycle_ms)
    low, high = found.low or found.value, found.high or found.value
    if measured is not None:
        ratio = measured.speedup
        answer: Answer = "pays" if ratio > 1 else "does not pay"
        if measured.speedups and min(measured.speedups) < 1 < max(measured.speedups):
            answer = "undecided"  # the rounds do not agree
        rates = (
            f"{measured.speculative_tokens_per_s:.1f} tokens/s instead of {baseline:.1f} "
            f"({ratio:.2f}x) at concurrency {measured.concurrency}"
        )
    else:
        answer = "pays" if low > needed else "does not pay" if high < needed else "undecided"
        rates = f"{found.value / cycle_ms * 1000:.1f} tokens/s instead of {baseline:.1f}"
    lead = {
        "pays": "This drafter pays",
        "does not pay": "This drafter does not pay",
        "undecided": "Whether this drafter pays is undecided",
        "unknown": "",
    }[answer]
    sentence = (
        f"{lead}: accept_len {found} at K = {steps} against {needed:.2f} to break even at "
        f"{cycle_ms:.1f} ms a cycle, {rates}."
    )
    if answer == "undecided" and measured is not None:
        spread = f"{min(measured.speedups):.2f}x to {max(measured.speedups):.2f}x"
        return Verdict(
            answer, sentence, f"Its rounds gave {spread}: measure more rounds or prompts."
        )
    return Verdict(answer, sentence, _next(answer, found, needed, steps))


def _unbelievable(found: Interval, measured: Speed) -> Verdict:
    step_ms = 1000 / measured.baseline_tokens_per_s
    return Verdict(
        "undecided",
        f"This sitting cannot be believed: a verify cycle took {measured.cycle_ms:.1f} ms, a plain step "
        f"of the baseline {step_ms:.1f} ms, so the baseline is slow for another reason than the missing "
        f"drafter (accept_len is {found}).",
        "Start both servers with the same arguments on an idle machine, and measure again.",
    )


def _next(answer: Answer, found: Interval, needed: float, steps: int) -> str:
    if answer == "pays":
        return "Serve it; measure again at the batch sizes that are served."
    if answer == "undecided":
        return "Evaluate on more held-out prompts: the interval holds the break-even point."
    if needed > steps + 1:
        fewest = smallest_steps(needed)
        more = f"at least K = {fewest}" if fewest else "more than any chain gives"
        return (
            f"K = {steps} drafts cannot deliver {needed:.2f} tokens a cycle at any accuracy: it takes "
            f"{more}, or a shorter cycle."
        )
    p = chain_acceptance(max(needed, 1.0), steps)
    now = chain_acceptance(min(max(found.value, 1.0), steps + 1.0), steps)
    assert p is not None
    assert now is not None
    return (
        f"Raise the acceptance of each draft token from {now:.0%} to {p:.0%} (more or better data; "
        "`datagen report` shows the scaling curve), or shorten the verify cycle."
    )
