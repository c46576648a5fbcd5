"""Acceptance of sampled responses with less noise: the last match of a step replaced by its probability.

Of a step at L whose drafts are d_1..d_K, the engine accepts d_j, given that it accepted those before,
with probability p(d_j): the target's own, after temperature, top_k and top_p. The record says what was
drawn; averaging over the draw instead,

    E[accepted] = sum over j of (prod over i < j of [d_i = x[L+i]]) * p_{L+j-1}(d_j)

has the same mean and a smaller variance. Depths behind a mismatch are unknown to the record and enter
through that first p alone. The walk moves by the recorded tokens, as it must. Of a greedy response p is
0 or 1, and nothing is gained. Steps cut by the end of the output are left out: what the engine would have
accepted beyond it is nobody's to know.

Never sum(min(p, q)): that is the acceptance of rejection sampling, which SGLang does not serve.

Shape suffixes: R rows P-1 .. N-3 of a sample, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from datagen.acceptance.replay import Replayed
from datagen.acceptance.walk import Step, leading_matches
from datagen.drafter.target import Target

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draw:
    """How a response was sampled, and by which target, on `device` already; `final_norm` of the stored

    final states.
    """

    target: Target
    device: torch.device
    final_norm: str
    temperature: float
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True, slots=True)
class Expected:
    """Per uncut step of a sample: tokens delivered as recorded, and as expected before the draw."""

    observed: tuple[float, ...]
    expected: tuple[float, ...]


def expected_of_sample(found: Replayed, draw: Draw) -> Expected | None:
    """Both figures of a replayed sample; None where no final states are stored."""
    sample, drafts_RK = found.sample, torch.from_numpy(found.drafts_RK)
    if sample.final_NH is None:
        return None
    n_rows, depth = drafts_RK.shape
    if not n_rows:
        return Expected((), ())
    # the draft of row r at depth j is compared with the token that final state P + r + j predicts
    states = torch.arange(n_rows)[:, None] - torch.arange(depth)
    tokens_RK = drafts_RK.gather(0, states.clamp(min=0)).clamp(min=0)
    first = sample.n_context
    final_RH = sample.final_NH[first : first + n_rows].to(draw.device)
    final_RH = draw.target.post_norm(final_RH, draw.final_norm)
    p_RK = draw.target.drawn(
        final_RH, tokens_RK.to(draw.device), temperature=draw.temperature, top_p=draw.top_p,
        top_k=draw.top_k,
    ).cpu()  # fmt: skip
    there = torch.arange(n_rows)[:, None] + torch.arange(depth)
    chance_RK = p_RK.gather(0, there.clamp(max=n_rows - 1)) * (there < n_rows)
    return expected_of(found.steps, sample.ids_N.numpy(), first, found.drafts_RK, chance_RK.numpy())


def expected_of(
    steps: Sequence[Step],
    ids_N: NDArray[np.int64],
    n_context: int,
    drafts_RK: NDArray[np.int64],
    probability_RK: Floats,
) -> Expected:
    """Both figures of one sample. `probability_RK[r, j]`: p(d_j) of the draft at row P-1+r, depth j,

    under the target's distribution of the token it is compared with; read only where every draft before
    it agrees with the record.
    """
    n, depth = len(ids_N), drafts_RK.shape[1]
    leading = leading_matches(ids_N, n_context, drafts_RK)
    observed, expected = [], []
    for step in steps:
        if step.cut(n, depth):
            continue
        row = step.length - n_context
        reached = min(int(leading[row]) + 1, depth)
        observed.append(1.0 + step.accepted)
        expected.append(1.0 + float(probability_RK[row, :reached].sum()))
    return Expected(tuple(observed), tuple(expected))


def mean_and_spread(samples: Iterable[tuple[str, Expected]]) -> dict[str, float | int] | None:
    """Means over all uncut steps, the standard error of each, and how much variance of a step is saved.

    `samples`: with the ids of their prompts. Steps of one prompt are not independent: the errors are of a
    ratio of sums over prompts (linearised). None with fewer than two prompts that have an uncut step.
    """
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for prompt_id, s in samples:
        if s.observed:
            pairs = zip(s.observed, s.expected, strict=True)
            by_prompt.setdefault(prompt_id, []).extend(pairs)
    if len(by_prompt) < 2:
        return None
    groups = [np.array(steps) for steps in by_prompt.values()]
    mean_2, error_2 = _ratio_and_error(groups)
    before, after = np.concatenate(groups).var(axis=0, ddof=1)
    return {
        "uncut_steps": sum(map(len, groups)),
        "observed": float(mean_2[0]), "observed_error": float(error_2[0]),
        "expected": float(mean_2[1]), "expected_error": float(error_2[1]),
        "variance_ratio": float(after / before) if before else 1.0,
    }  # fmt: skip


def _ratio_and_error(groups: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Mean of all rows [n, 2] of all groups, and its standard error with groups drawn as wholes."""
    sums, counts = np.array([g.sum(axis=0) for g in groups]), np.array([len(g) for g in groups])
    mean = sums.sum(axis=0) / counts.sum()
    off = np.square(sums - mean * counts[:, None]).sum(axis=0)
    return mean, np.sqrt(off * len(groups) / (len(groups) - 1)) / counts.sum()
