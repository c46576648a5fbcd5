"""How a group of tasks ended, as one error."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, ParamSpec

from datagen.errors import DatagenError, Interrupted

P = ParamSpec("P")


class LastWord:
    """Keeps a stop on request back until the tasks beside it have ended: their rows are at servers.

    A task group would cancel them. `with last_word:` and `last_word.of(...)` take Interrupted; `say`
    raises it. Any other error passes, and ends the group at once.
    """

    def __init__(self) -> None:
        self.stopped: Interrupted | None = None

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        if isinstance(error, Interrupted):
            self.stopped = self.stopped or error
        return isinstance(error, Interrupted)

    async def of(
        self, work: Callable[P, Coroutine[Any, Any, object]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Do `work(...)`, whose stop waits. A coroutine would be left over if this never began."""
        with self:
            await work(*args, **kwargs)

    def say(self) -> None:
        """Raise the first stop that was kept back, if there was one."""
        if self.stopped is not None:
            raise self.stopped


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to report of a group: ours before others, the first before the later."""
    leaves: list[BaseException] = []
    queue: list[BaseException] = [group]
    while queue:
        error = queue.pop(0)
        if isinstance(error, BaseExceptionGroup):
            queue[:0] = error.exceptions
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, DatagenError)), leaves[0])
