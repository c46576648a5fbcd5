"""Many time limits for the price of one timer: for rows, of which thousands may be out at once."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

LOOK_EVERY_S = 0.2


class Deadlines:
    """`with deadlines.within(s):` raises TimeoutError once `s` seconds are over, LOOK_EVERY_S late at most.

    As `asyncio.timeout`, for limits of seconds to hours: that one sets and clears a timer of the event
    loop for each row, 0.03 ms; here all that are open are looked at together.
    """

    def __init__(self) -> None:
        self._open: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def within(self, seconds: float) -> Deadline:
        """A limit for the block that the running task enters with it."""
        return Deadline(self, seconds)

    def add(self, deadline: Deadline) -> None:
        """Watch `deadline`."""
        self._open.add(deadline)
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:  # a loop that has ended keeps its timer
            self._arm(loop)

    def remove(self, deadline: Deadline) -> None:
        """Its block is left."""
        self._open.discard(deadline)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._timer = loop, loop.call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        for deadline in [d for d in self._open if d.due <= now]:
            self._open.discard(deadline)
            deadline.end()
        self._timer = None
        if self._open:
            self._arm(asyncio.get_running_loop())


class Deadline:
    """One limit; see `Deadlines.within`."""

    __slots__ = ("_asked_before", "_owner", "_task", "due", "expired")

    def __init__(self, owner: Deadlines, seconds: float) -> None:
        self._owner = owner
        self.due = time.monotonic() + seconds
        self.expired = False
        """True once this limit, and not another one, ended the block."""

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline belongs to a task")
        self._task, self._asked_before = task, task.cancelling()
        self._owner.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._owner.remove(self)
        # as asyncio.timeout: a cancellation by others at the same moment stays one
        if (
            self.expired
            and self._task.uncancel() <= self._asked_before
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error

    def end(self) -> None:
        """The time is over."""
        self.expired = True
        self._task.cancel()
