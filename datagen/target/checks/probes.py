"""A few questions to a server, shared by all checks, as many as possible at once.

One prompt is answered and captured alone, with nothing beside it. Then, together: a long prompt, the
prompt with its answer, the prompt again, and once more among others. Then many answers at once, for the
speed and for the same answer in company; and the conversations that the server renders itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datagen.capture.spool import discard
from datagen.errors import CaptureUnproven
from datagen.target.capture import rows_of, take_capture
from datagen.target.checks.renderings import QUESTION, Rendered, render_all
from datagen.target.checks.subject import Subject, chunk_of
from datagen.target.client import Capture
from datagen.target.failures import RequestFailure
from datagen.target.preflight import context_of
from datagen.target.states import capture_rows
from datagen.target.weights import Float, as_float32

FILE_PATIENCE_S = 10.0
TOP = 5
PLACES = ("Brest", "Genoa", "Lagos", "Osaka", "Riga", "Tunis", "Quito", "Perth", "Cork", "Lima")
GOODS = (
    "copper",
    "lemons",
    "rope",
    "glass",
    "salt",
    "maps",
    "wool",
    "lamps",
    "tea",
    "paper",
    "oil",
)
MONTHS = ("January", "March", "April", "June", "August", "October", "December")


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer: ids, how it ended, and per token the likeliest (log-probability, id)."""

    output_ids: list[int]
    finish: dict[str, Any]
    top: list[list[tuple[float, int]]]


@dataclass(slots=True)
class Attempt:
    """One capture as it went: the engine's note, the rows, or why there are none."""

    ids: list[int]
    note: Capture | None = None
    bits: NDArray[np.uint16] | None = None
    failure: CaptureUnproven | RequestFailure | None = None
    age_s: float | None = None
    """Our clock minus the file's time stamp, when it was just published."""

    def values(self, dtype: str, hidden: int) -> Float:
        """float32 [tokens, K+1, hidden]; call it only where there are rows."""
        assert self.bits is not None
        return as_float32(self.bits, dtype).reshape(len(self.ids), -1, hidden)


@dataclass(slots=True)
class Evidence:
    """Everything that was asked and answered. Absent entries were not asked: `plain` failed before."""

    info: dict[str, Any]
    model: dict[str, Any]
    plain_ids: list[int]
    alone: Answer | RequestFailure | None = None
    stopped: Answer | RequestFailure | None = None
    stop_at: int | None = None
    company: list[Answer | RequestFailure] = field(default_factory=list)
    """The same prompt again among others first, then the others."""
    company_s: float = 0.0
    captures: dict[str, Attempt] = field(default_factory=dict)
    batched: list[Attempt] = field(default_factory=list)
    captured_tokens: int = 0
    capture_s: float = 0.0
    rendered: dict[str, Rendered] = field(default_factory=dict)
    """Of `conversations`: the ids rendered here and by the server."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What one check computed and another needs."""


def passage(subject: Subject, salt: int, n_tokens: int) -> list[int]:
    """Ids of a readable prompt of exactly `n_tokens`, different for every `salt`."""
    sentences = 4
    while True:
        text = f"Report {salt}. " + " ".join(
            f"In {MONTHS[(i * 3 + salt) % 7]} the market of {PLACES[(i + salt) % 10]} sold "
            f"{(i * 37 + salt * 11) % 90 + 3} tons of {GOODS[(i * 5 + salt) % 11]}, and ships left "
            f"for {PLACES[(i * 3 + salt + 1) % 10]}."
            for i in range(sentences)
        )
        ids = subject.renderer.render([{"role": "user", "content": text}], None, None)
        if len(ids) >= n_tokens:
            return ids[:n_tokens]
        sentences *= 2


def long_tokens(subject: Subject, info: dict[str, Any]) -> int:
    """Length of the prompt that should be prefilled in several pieces."""
    wanted = chunk_of(info) + 64 if chunk_of(info) else subject.effort.long_tokens
    return max(min(wanted, context_of(info, subject.profile) - 2), 2)


async def gather_evidence(
    subject: Subject, info: dict[str, Any], model: dict[str, Any]
) -> Evidence:
    """Ask all questions; failures of the server become evidence, nothing of it is raised."""
    plain = subject.renderer.render([{"role": "user", "content": QUESTION}], None, None)
    found = Evidence(info, model, plain)
    effort = subject.effort
    found.alone = await _answer(subject, plain, effort.answer_tokens)
    await _stop(subject, found)
    if subject.captures:
        found.captures["plain"] = first = await _capture(subject, plain)
        if first.bits is not None:
            await _captures(subject, found)
    await asyncio.gather(_company(subject, found), _rendered(subject, found))
    return found


async def _captures(subject: Subject, found: Evidence) -> None:
    effort, plain = subject.effort, found.plain_ids
    size = max(min(effort.filler_tokens, context_of(found.info, subject.profile) - 2), 1)
    long = passage(subject, 1, long_tokens(subject, found.info))
    # a prompt that is not cut shares its pass with the others; one that is fills passes by itself
    beside = effort.batch_tokens - (0 if chunk_of(found.info) else len(long))
    others = [passage(subject, 100 + i, size) for i in range(max(-(-beside // size), 1))]
    middle = -(-len(others) // 2)
    batch = [*others[:middle], plain, *others[middle:]]
    asked = {"long": long, "repeated": plain}
    if isinstance(found.alone, Answer):
        asked["answered"] = [*plain, *found.alone.output_ids]
    began = time.monotonic()
    tokens = sum(map(len, [*batch, *asked.values()]))
    done = await asyncio.gather(*(_capture(subject, ids) for ids in [*batch, *asked.values()]))
    found.capture_s = time.monotonic() - began
    found.captured_tokens = tokens
    found.batched = list(done[: len(batch)])
    found.captures |= dict(zip(asked, done[len(batch) :], strict=True))
    if not chunk_of(found.info):
        found.batched.append(found.captures["long"])


async def _capture(subject: Subject, ids: Sequence[int]) -> Attempt:
    rid = f"preflight-{uuid.uuid4().hex}"
    attempt = Attempt(list(ids))
    path: Path | None = None
    try:
        if subject.mode == "json":
            captured = await capture_rows(
                subject.client, ids, rid, subject.profile, mode="json", final=subject.final
            )
            attempt.bits = captured.rows
            return attempt
        attempt.note = await subject.client.capture(ids, rid=rid)
        path = attempt.note.path
        if not await asyncio.to_thread(path.parent.is_dir):
            return attempt  # no file can come; the check of the spool says so
        spooled = await take_capture(
            attempt.note, ids, rid, subject.profile, patience_s=FILE_PATIENCE_S
        )
        attempt.age_s = time.time() - path.stat().st_mtime
        attempt.bits = rows_of(spooled)
        discard(path)
    except (CaptureUnproven, RequestFailure) as e:
        attempt.failure = e
        if path is not None:
            await _discard_late(path)
    return attempt


async def _discard_late(path: Path) -> None:
    """A refused capture's file appears a moment after its answer; nobody else would remove it."""
    for _ in range(20):
        if await asyncio.to_thread(path.exists):
            break
        await asyncio.sleep(0.05)
    discard(path)


async def _answer(
    subject: Subject, ids: Sequence[int], n: int, stop: Sequence[int] | None = None
) -> Answer | RequestFailure:
    """A greedy answer of `n` tokens; it runs past the end of its turn unless `stop` is given."""
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": n, "ignore_eos": stop is None}
    if stop is not None:
        params["stop_token_ids"] = list(stop)
    body = {
        "input_ids": list(ids), "sampling_params": params, "return_logprob": True,
        "top_logprobs_num": TOP,
    }  # fmt: skip
    try:
        said = await subject.client.native(body, rid=f"preflight-{uuid.uuid4().hex}")
    except RequestFailure as e:
        return e
    meta = said["meta_info"]
    top = [
        [(float(score), int(token)) for score, token, *_ in place]
        for place in meta.get("output_top_logprobs") or ()
    ]
    return Answer([int(i) for i in said["output_ids"]], meta.get("finish_reason") or {}, top)


async def _stop(subject: Subject, found: Evidence) -> None:
    """Ask again with a stop token that the answer is known to hold."""
    if not isinstance(found.alone, Answer):
        return
    said, ends = found.alone.output_ids, set(subject.profile.stop_token_ids)
    natural = [i for i, token in enumerate(said) if token in ends]
    fresh = [i for i, token in enumerate(said) if i and token not in said[:i]]
    if not said:
        return
    found.stop_at = (natural or fresh or [0])[0]
    stop = [said[found.stop_at]]
    found.stopped = await _answer(subject, found.plain_ids, len(said), stop)


async def _company(subject: Subject, found: Evidence) -> None:
    effort = subject.effort
    others = [
        passage(subject, 200 + i, len(found.plain_ids)) for i in range(effort.concurrency - 1)
    ]
    began = time.monotonic()
    found.company = list(
        await asyncio.gather(
            *(_answer(subject, ids, effort.speed_tokens) for ids in [found.plain_ids, *others])
        )
    )
    found.company_s = time.monotonic() - began


async def _rendered(subject: Subject, found: Evidence) -> None:
    found.rendered = await render_all(subject)
