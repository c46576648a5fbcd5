"""What a plan costs before a GPU is used: tokens, bytes per codec, hours, and whether the disk holds it.

Of a prompt with P prompt tokens and n turns that are answered with A tokens each, turn k (1..n) is
asked with about P k/n tokens of skeleton and (k-1) A tokens of earlier answers. Its states are captured
over context and answer, so that
    generated tokens   n A
    captured tokens    sum over k of (P k/n + k A)  =  P (n+1)/2 + A n (n+1)/2
A state row is `profile.bytes_per_token` bytes raw: 57,344 for Kimi-K2.5.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datagen.store.plan import PlannedPrompt
from datagen.target.profile import Profile
from datagen.target.tokens import Conversation

CODEC_RATIOS = {"raw": 1.0, "plane": 1.497, "ipc-zstd": 1.454, "mantissa-4": 2.0}
"""Raw bytes per stored byte, measured on real hidden states; mantissa-4 is lossy."""
USUAL_ANSWER_TOKENS = 800
"""Mean length of a large model's answer, where nothing was measured."""
SCALES = (10_000, 37_000, 83_000, 1_400_000)
UNTAGGED = "untagged"
BARS = 40


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one server is, measured or stated. Tokens a second over all its requests together."""

    generate_tokens_per_s: float
    prefill_tokens_per_s: float
    gpus_per_server: int = 8
    servers: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """What some number of prompts takes. Hours are None where no speed was given."""

    prompts: int
    samples: int
    generated_tokens: int
    captured_tokens: int
    stored_bytes: dict[str, int]
    hours: float | None
    gpu_hours: float | None


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """A plan in figures. `histogram`: (least, most, prompts) of prompt tokens, in powers of two."""

    target: str
    cost: Cost
    prompts_by_split: dict[str, int]
    samples_by_split: dict[str, int]
    multi_turn: int
    with_tools: int
    thinking_on: int | None
    languages: dict[str, int]
    categories: dict[str, int]
    sources: dict[str, int]
    licences: dict[str, int]
    prompt_tokens: int
    histogram: tuple[tuple[int, int, int], ...]
    answer_tokens: float
    bytes_per_token: int
    token_ratio: str | None
    """How prompt tokens were guessed; None when the target's own tokenizer counted them."""
    scale: tuple[Cost, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """Whether the file system of `path` has room."""

    path: str
    free_bytes: int
    needed_bytes: int

    @property
    def enough(self) -> bool:
        """True when it has."""
        return self.free_bytes >= self.needed_bytes


def estimate_plan(
    prompts: Iterable[PlannedPrompt],
    profile: Profile,
    *,
    answer_tokens: float | None = None,
    speed: Speed | None = None,
    token_ratio: str | None = None,
) -> PlanEstimate:
    """The cost of planned prompts.

    answer_tokens   expected mean length of an answer; None is 800. Never above a prompt's own limit
    token_ratio     how prompt tokens were guessed, where they were
    """
    expected = USUAL_ANSWER_TOKENS if answer_tokens is None else answer_tokens
    counts: dict[str, Counter[str]] = {
        name: Counter()
        for name in ("split", "samples", "language", "category", "source", "licence")
    }
    sizes: Counter[int] = Counter()
    multi_turn = with_tools = thinking_on = thinking_known = prompt_tokens = 0
    generated = captured = 0.0
    for prompt in prompts:
        n, answer = prompt.n_turns, min(expected, prompt.max_new_tokens)
        generated += n * answer
        captured += prompt.prompt_tokens * (n + 1) / 2 + answer * n * (n + 1) / 2
        prompt_tokens += prompt.prompt_tokens
        multi_turn += n > 1
        with_tools += prompt.tools is not None
        thinking_on += prompt.thinking is True
        thinking_known += prompt.thinking is not None
        sizes[max(prompt.prompt_tokens, 1).bit_length()] += 1
        counts["split"][prompt.split] += 1
        counts["samples"][prompt.split] += n
        counts["language"][prompt.language or UNTAGGED] += 1
        counts["category"][prompt.category or UNTAGGED] += 1
        counts["source"][prompt.source] += 1
        counts["licence"][prompt.licence] += 1
    n_prompts, n_samples = counts["split"].total(), counts["samples"].total()
    totals = (n_prompts, n_samples, generated, captured)
    bins = range(min(sizes, default=1), max(sizes, default=0) + 1)
    return PlanEstimate(
        target=profile.name,
        cost=_cost(totals, n_prompts, profile, speed),
        prompts_by_split=dict(counts["split"]),
        samples_by_split=dict(counts["samples"]),
        multi_turn=multi_turn,
        with_tools=with_tools,
        thinking_on=thinking_on if thinking_known else None,
        languages=dict(counts["language"].most_common()),
        categories=dict(counts["category"].most_common()),
        sources=dict(counts["source"].most_common()),
        licences=dict(counts["licence"].most_common()),
        prompt_tokens=prompt_tokens,
        histogram=tuple((1 << (b - 1), (1 << b) - 1, sizes[b]) for b in bins),
        answer_tokens=expected,
        bytes_per_token=profile.bytes_per_token,
        token_ratio=token_ratio,
        scale=tuple(_cost(totals, size, profile, speed) for size in SCALES),
    )


def disk_check(path: Path, needed_bytes: int) -> DiskCheck:
    """Room for `needed_bytes` where `path` is or will be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return DiskCheck(str(path), shutil.disk_usage(place).free, needed_bytes)


def histogram_lines(estimate: PlanEstimate) -> list[str]:
    """The lengths as a plot of text, one line a bin."""
    tallest = max((n for _, _, n in estimate.histogram), default=1)
    return [
        f"{least:>9,} - {most:<9,} {n:>9,}  {'█' * max(round(BARS * n / tallest), n > 0)}"
        for least, most, n in estimate.histogram
    ]


def hours_on(speed: Speed, generated_tokens: float, captured_tokens: float) -> float:
    """Hours that generating and capturing so many tokens takes on all servers together."""
    seconds = generated_tokens / speed.generate_tokens_per_s
    seconds += captured_tokens / speed.prefill_tokens_per_s
    return seconds / 3600 / speed.servers


def _cost(
    totals: tuple[int, int, float, float], n_prompts: int, profile: Profile, speed: Speed | None
) -> Cost:
    """The cost of `n_prompts` like those of the totals (prompts, samples, generated, captured)."""
    of_plan, samples, generated, captured = totals
    factor = n_prompts / max(of_plan, 1)
    raw = captured * factor * profile.bytes_per_token
    hours = hours_on(speed, generated * factor, captured * factor) if speed else None
    return Cost(
        prompts=n_prompts,
        samples=round(samples * factor),
        generated_tokens=round(generated * factor),
        captured_tokens=round(captured * factor),
        stored_bytes={codec: round(raw / ratio) for codec, ratio in CODEC_RATIOS.items()},
        hours=hours,
        gpu_hours=hours * speed.servers * speed.gpus_per_server if speed and hours else hours,
    )


class RatioCounter:
    """Stands in for a tokenizer that cannot be had: tokens by a fixed ratio. For estimates only."""

    ascii_per_token = 4.0
    tokens_per_other = 0.75
    tokens_per_message = 6

    @property
    def ratio(self) -> str:
        """The ratio in words, to be printed beside every figure made with it."""
        return (
            f"1 token per {self.ascii_per_token:g} ASCII characters, {self.tokens_per_other:g} per "
            f"other character, {self.tokens_per_message} per message"
        )

    @property
    def digest(self) -> str:
        """Names the ratio; never equal to a tokenizer's digest."""
        return f"estimated: {self.ratio}"

    def count_many(self, conversations: Sequence[Conversation]) -> list[int]:
        """Estimated lengths, in order."""
        return [self._count(messages, tools) for messages, tools, _ in conversations]

    def _count(self, messages: list[dict[str, Any]], tools: Any) -> int:
        text = "".join(m["content"] for m in messages)
        calls = "".join(str(m["tool_calls"]) for m in messages if "tool_calls" in m)
        text += calls + (str(tools) if tools else "")
        n_ascii = len(text.encode("ascii", "ignore"))
        other = (len(text) - n_ascii) * self.tokens_per_other
        return round(n_ascii / self.ascii_per_token + other) + self.tokens_per_message * len(
            messages
        )
