"""The expected acceptance of sampled responses has the mean of the drawn one, and less noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from datagen.acceptance.expected import (
    Draw,
    Expected,
    expected_of,
    expected_of_sample,
    mean_and_spread,
)
from datagen.acceptance.metrics import Counts
from datagen.acceptance.replay import Replayed
from datagen.acceptance.walk import walk
from datagen.drafter.rows import Sample
from datagen.drafter.target import LogitRule, Target

VOCAB, DEPTH, CONTEXT, SAID = 6, 2, 2, 14
COUNTS = Counts("s-0", "s", 0, 0)


def target(head_VH: torch.Tensor) -> Target:
    return Target(
        head_VH, head_VH, torch.ones(head_VH.shape[1]), 1e-5, LogitRule(), "llama", 64, {}
    )


def markov(rng: np.random.Generator) -> np.ndarray:
    """p(next | token), [V, V]: a target whose distribution is known without a model."""
    raw = rng.random((VOCAB, VOCAB)) ** 3 + 0.02
    return np.asarray(raw / raw.sum(1, keepdims=True))


def response(rng: np.random.Generator, p_VV: np.ndarray) -> np.ndarray:
    ids = [0, int(rng.integers(VOCAB))]
    for _ in range(SAID):
        ids.append(int(rng.choice(VOCAB, p=p_VV[ids[-1]])))
    return np.array(ids)


def drafts_for(ids: np.ndarray, guess_V: np.ndarray) -> np.ndarray:
    """A drafter that follows `guess_V` from the token a row has read, [R, K]."""
    known = ids[CONTEXT : len(ids) - 1]  # x[t+1] of rows P-1 .. N-3
    first = guess_V[known]
    return np.stack([first, guess_V[first]], axis=1)


def test_the_mean_is_that_of_the_draws_and_the_variance_smaller() -> None:
    rng = np.random.default_rng(3)
    p_VV = markov(rng)
    guess_V = p_VV.argmax(1)
    found = []
    for number in range(1500):
        ids = response(rng, p_VV)
        drafts = drafts_for(ids, guess_V)
        known = ids[CONTEXT : len(ids) - 1]
        chance = np.stack(
            [p_VV[known, drafts[:, 0]], p_VV[drafts[:, 0], drafts[:, 1]]], axis=1
        )  # read only where the draft before is the record
        one = expected_of(walk(ids, CONTEXT, drafts), ids, CONTEXT, drafts, chance)
        found.append((str(number), one))
    said = mean_and_spread(found)
    assert said is not None
    assert abs(said["expected"] - said["observed"]) < 3 * said["observed_error"]
    assert said["variance_ratio"] < 0.8
    first = p_VV[np.arange(VOCAB), guess_V]
    assert 1 < said["expected"] < 1 + first.max() + 1


def test_probabilities_are_read_from_the_states_that_predict_the_tokens() -> None:
    """One-hot states and a head of log p: the target's distribution after token v is p_VV[v]."""
    rng = np.random.default_rng(5)
    p_VV = markov(rng)
    ids = response(rng, p_VV)
    drafts = drafts_for(ids, p_VV.argmax(1))
    states = torch.nn.functional.one_hot(torch.from_numpy(ids), VOCAB).float()
    states[-1] = torch.nan  # what the last token predicts is nobody's to compare with
    sample = Sample("s-0", torch.from_numpy(ids), CONTEXT, torch.zeros(len(ids), 1), states)
    steps = walk(ids, CONTEXT, drafts)
    head = torch.from_numpy(np.log(p_VV).T.copy()).float()
    draw = Draw(target(head), torch.device("cpu"), "post", 1.0)
    found = expected_of_sample(Replayed(sample, steps, COUNTS, drafts), draw)
    known = ids[CONTEXT : len(ids) - 1]
    chance = np.stack([p_VV[known, drafts[:, 0]], p_VV[drafts[:, 0], drafts[:, 1]]], axis=1)
    by_hand = expected_of(steps, ids, CONTEXT, drafts, chance)
    assert found is not None
    assert found.observed == by_hand.observed
    assert found.expected == pytest.approx(by_hand.expected, abs=1e-5)
    assert any(e != round(e) for e in found.expected)


def test_what_a_target_draws_from_is_cut_and_renormalised() -> None:
    head = torch.log(torch.tensor([[0.5], [0.3], [0.15], [0.05]]))
    tokens, one = torch.arange(4)[None], torch.ones(1, 1)
    whole = target(head).drawn(one, tokens, temperature=1.0, top_p=1.0, top_k=-1)
    assert whole[0].tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-6)
    nucleus = target(head).drawn(one, tokens, temperature=1.0, top_p=0.6, top_k=-1)
    assert nucleus[0].tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    top = target(head).drawn(one, tokens, temperature=0.5, top_p=1.0, top_k=2)
    assert top[0].tolist() == pytest.approx([25 / 34, 9 / 34, 0, 0], abs=1e-6)


def test_steps_of_one_prompt_are_not_counted_as_independent() -> None:
    """A hundred steps alike of each of two prompts: two observations, one token either side of 2."""
    easy, hard = Expected((3.0,) * 100, (3.0,) * 100), Expected((1.0,) * 100, (1.0,) * 100)
    said = mean_and_spread([("a", easy), ("b", hard), ("c", Expected((), ()))])
    assert said is not None
    assert (said["observed"], said["uncut_steps"]) == (2.0, 200)
    assert said["observed_error"] == pytest.approx(1.0)
    assert mean_and_spread([("a", easy), ("a", hard)]) is None, "turns of one prompt"


def test_what_draws_are_taken_from_is_moved_once() -> None:
    moved = target(torch.eye(3)).head_on(torch.device("meta"))
    assert (moved.head_VH.device.type, moved.norm_H.device.type) == ("meta", "meta")
    assert moved.embed_VH.device.type == "cpu"


def test_cut_steps_and_greedy_text_add_nothing() -> None:
    assert mean_and_spread([]) is None
    ids = np.array([0, 1, 2, 3])
    drafts = np.array([[3, 9]])
    found = expected_of(walk(ids, 2, drafts), ids, 2, drafts, np.ones((1, 2)))
    assert found.observed == ()
