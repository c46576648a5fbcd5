"""Which verify steps an engine takes over a recorded response, given what the drafter would draft.

x[0..N-1] are the ids, x[P..N-1] the response, L the tokens the target has read. A step at L verifies the
drafts of row L-1 against x[L+1], x[L+2], ...; it accepts the first a that agree and emits a+1 tokens,
less what the end of the output cuts. Greedy and sampled alike: verification of a chain emits the draft
exactly when it accepts it, so "accepted" and "the recorded token equals the draft" are one event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from datagen.acceptance.metrics import Counts, distinct_n


class Step(NamedTuple):
    """One verify step: `length` L before it, drafts accepted, tokens emitted.

    From the record alone `accepted` of the last step counts drafts within the output; a live engine
    also counts those accepted beyond its end.
    """

    length: int
    accepted: int
    emitted: int

    def cut(self, n_tokens: int, draft_steps: int) -> bool:
        """True when the output may end before the drafts do: the engine's count may be larger."""
        return self.length + 1 + draft_steps > n_tokens - 1


def walk(ids_N: NDArray[np.int64], n_context: int, drafts_RK: NDArray[np.int64]) -> list[Step]:
    """The steps over one response. `drafts_RK`: target ids drafted at rows P-1, P, ... N-3."""
    n, p = len(ids_N), n_context
    if len(drafts_RK) != max(n - 1 - p, 0):
        raise ValueError(f"{len(drafts_RK)} rows of drafts for a response of {n - p} tokens")
    leading = leading_matches(ids_N, n_context, drafts_RK)
    steps, length = [], p
    while length <= n - 2:
        accepted = int(leading[length - p])
        steps.append(Step(length, accepted, min(accepted + 1, n - 1 - length)))
        length += accepted + 1
    if sum(s.emitted for s in steps) != max(n - p - 1, 0):
        raise AssertionError("the steps do not emit the response")
    return steps


def leading_matches(
    ids_N: NDArray[np.int64], n_context: int, drafts_RK: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Drafts of every row that agree with the record before the first that does not, within it."""
    n, p = len(ids_N), n_context
    rows, depth = drafts_RK.shape
    where_RK = np.arange(p + 1, p + 1 + rows)[:, None] + np.arange(depth)
    exists_RK = where_RK < n
    agree_RK = (drafts_RK == np.asarray(ids_N)[np.minimum(where_RK, n - 1)]) & exists_RK
    return np.asarray(np.cumprod(agree_RK, axis=1).sum(axis=1))


def counts_of(
    steps: Sequence[Step],
    *,
    sample_id: str,
    prompt_id: str,
    ids_N: NDArray[np.int64],
    n_context: int,
    draft_steps: int,
    tags: Mapping[str, str] | None = None,
) -> Counts:
    """What the steps of one sample add up to. Depth j is eligible in a step if L + j <= N - 1."""
    n = len(ids_N)
    depths = range(1, draft_steps + 1)
    return Counts(
        sample_id=sample_id,
        prompt_id=prompt_id,
        tokens=max(n - n_context - 1, 0),
        steps=len(steps),
        eligible=tuple(
            sum(s.accepted >= j - 1 and s.length + j <= n - 1 for s in steps) for j in depths
        ),
        accepted=tuple(sum(s.accepted >= j for s in steps) for j in depths),
        tags=dict(tags or {}),
        distinct=distinct_n(ids_N[n_context:]),
    )
