"""What is fanned out: a row of work, its answer, and the ways it can end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Flag, IntEnum
from typing import Any, Generic, TypeVar

from datagen.fanout.endpoint import Endpoint

T = TypeVar("T")


class Role(Flag):
    """What a server is asked for."""

    GENERATE = 1
    CAPTURE = 2
    BOTH = GENERATE | CAPTURE


class Priority(IntEnum):
    """Rows nearest to completion first, so that partitions close and the spool stays short.

    Before those that begin, the conversations that will take longest: started last, they would be
    all that runs at the end.
    """

    CAPTURE = 0
    LONG = 1
    NEXT_TURN = 2
    FIRST_TURN = 3


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """One row: how to ask a server, and what the dispatcher must know of it.

    `tokens`: the most it can take, for its deadline; `size`: tokens of its answer. `sticky`: the
    endpoint that answered its earlier turn, preferred among equally loaded ones.
    """

    call: Callable[[Endpoint], Awaitable[T]]
    role: Role
    priority: Priority
    tokens: int = 0
    size: Callable[[T], int] | None = None
    sticky: str | None = None


class Rejected(Exception):
    """A row cannot be collected; `reason` goes into the books."""

    def __init__(self, reason: str, detail: str, attempts: int) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.attempts = reason, detail, attempts


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """A row's answer, where it came from and what it took (seconds in our queue, in the server)."""

    value: T
    endpoint: str
    attempts: int
    queue_s: float
    server_s: float


@dataclass(slots=True, eq=False)
class Row:
    """A row on its way. `order` never changes, so that a row that comes back is ahead of the rest.

    `attempts`: failures of its own; `deaths`: servers that failed while they had it.
    """

    work: Work[Any]
    order: int
    queued_at: float
    future: asyncio.Future[Answered[Any]]
    attempts: int = 0
    deaths: int = 0
    avoid: str | None = None
    flight: asyncio.Task[None] | None = None
    sent_at: float = 0.0
