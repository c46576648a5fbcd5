"""What counts as an answer: not an empty one, not a loop, and one cut by its limit only if so wished."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 64


def looped_tail(ids: NDArray[np.int32]) -> int:
    """Tokens at the end of `ids` that repeat one period of at most MAX_PERIOD tokens, twice or more.

    The longest such tail over all periods; 0 when nothing repeats.
    """
    longest = 0
    last = ids[-1 - min(MAX_PERIOD, len(ids) // 2) : -1] == ids[-1:]
    for period in len(last) - np.flatnonzero(last):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        same = len(ids) - int(period) - (int(differs[-1]) + 1 if len(differs) else 0)
        if same >= period:
            longest = max(longest, same + int(period))
    return longest


def fault(ids: NDArray[np.int32], stop_token_ids: Collection[int], loop_tokens: int) -> str | None:
    """Why `ids`, int32 [n], are no answer: `empty_output`, `repetition_loop`, or None.

    `loop_tokens`: repeated tokens at the end that make a loop; 0 allows any number.
    """
    ends = len(ids) > 0 and int(ids[-1]) in stop_token_ids
    said = ids[:-1] if ends else ids
    if not len(said) or np.isin(said, list(stop_token_ids)).all():
        return "empty_output"
    if loop_tokens and len(said) >= loop_tokens and looped_tail(said) >= loop_tokens:
        return "repetition_loop"
    return None
