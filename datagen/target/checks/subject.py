"""What is checked, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datagen.target.client import SGLangClient
from datagen.target.profile import Profile
from datagen.target.states import Mode
from datagen.target.tokens import Renderer, Rendering


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes of the probes, in tokens and requests."""

    answer_tokens: int = 16
    batch_tokens: int = 2304
    """Tokens prefilled beside the one prompt that is compared; all-reduce fusion begins at 2,048."""
    filler_tokens: int = 384
    long_tokens: int = 640
    """Of a prompt meant to be cut in pieces, where the server does not say its chunk."""
    concurrency: int = 32
    speed_tokens: int = 32


FULL = Effort()
QUICK = Effort(
    answer_tokens=8, batch_tokens=96, filler_tokens=48, long_tokens=528, concurrency=4, speed_tokens=8
)  # fmt: skip
"""For the embedded target at the start of a run: it has no ranks whose sums could be missed."""
EMBEDDED = "datagen-embedded"


@dataclass(frozen=True, slots=True)
class Subject:
    """One server under test. `checkpoint`: its weights, where they lie on this machine."""

    client: SGLangClient
    profile: Profile
    renderer: Renderer
    mode: Mode = "spool"
    rendering: Rendering = "auto"
    final: SGLangClient | None = None
    checkpoint: Path | None = None
    captures: bool = True
    """False for a server that only generates."""
    generates: bool = True
    """False for a server that only captures: it renders nothing for the run."""
    spool_bytes: int = 1 << 30
    """Most bytes of states that a run asks for and has not stored yet."""
    effort: Effort = FULL


def usual_effort(info: dict[str, Any]) -> Effort:
    """How much is asked at the start of a run, of a server that says `info` of itself."""
    return QUICK if info.get("engine") == EMBEDDED else FULL


def fitted(effort: Effort, info: dict[str, Any]) -> Effort:
    """`effort`, as far as a server that says `info` of itself needs it."""
    if info.get("engine") != EMBEDDED:
        return effort
    # on a CPU 16 tokens tell the speed as well as 32
    return replace(effort, speed_tokens=min(effort.speed_tokens, 16))


def chunk_of(info: dict[str, Any]) -> int:
    """Tokens a server prefills at once, by its own word; 0 when it says that it does not cut."""
    return max(int(info.get("chunked_prefill_size") or 0), 0)
