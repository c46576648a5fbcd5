"""What counts as an answer: not an empty one, not a loop, and one cut by its limit only if so wished."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

MAX_PERIOD = 64


def looped_tail(ids: Sequence[int]) -> int:
    """Tokens at the end of `ids` that repeat one period of at most MAX_PERIOD tokens, twice or more.

    The longest such tail over all periods; 0 when nothing repeats.
    """
    tokens = np.asarray(ids)
    longest = 0
    for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        same = len(tokens) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if same >= period:
            longest = max(longest, same + period)
    return longest


def fault(ids: Sequence[int], stop_token_ids: Collection[int], loop_tokens: int) -> str | None:
    """Why `ids` are no answer: `empty_output`, `repetition_loop`, or None. `loop_tokens` 0: no limit."""
    if not set(ids) - set(stop_token_ids):
        return "empty_output"
    said = ids[:-1] if ids[-1] in stop_token_ids else ids
    if loop_tokens and len(said) >= loop_tokens and looped_tail(said) >= loop_tokens:
        return "repetition_loop"
    return None
