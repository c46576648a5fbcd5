"""How a group of tasks ended, as one error."""

from __future__ import annotations

from datagen.errors import DatagenError


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
