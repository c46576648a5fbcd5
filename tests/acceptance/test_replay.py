"""Replay against a plain engine, slot by slot; and the seven kinds of test that its rules ask for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from datagen.acceptance.metrics import conditional_acceptance, predicted_accept_len
from datagen.acceptance.replay import NOT_DRAFTED, Replay
from datagen.acceptance.walk import counts_of, walk
from datagen.drafter.model import Drafter
from datagen.drafter.rows import Sample
from datagen.errors import MeasurementError
from tests.acceptance.oracle import (
    HIDDEN,
    VOCAB,
    Run,
    Target,
    free_run,
    prompt_of,
    sample_of,
    speculate,
    trained_pair,
)

LENGTHS = (1, 2, 3, 5, 17, 40)


def replay(target: Target, drafter: Drafter, steps: int, **more: object) -> Replay:
    return Replay(drafter, target.embed_VH, steps=steps, dtype=torch.float64, **more)  # type: ignore[arg-type]


def assert_same(run: Run, target: Target, drafter: Drafter, steps: int) -> int:
    """Same verify_ct, same L everywhere, same a but in the last step. Returns the overshoot."""
    ids = [*run.prompt, *run.output]
    [found] = replay(target, drafter, steps).run([sample_of(target, ids, len(run.prompt))])
    r = len(run.output)
    assert len(found.steps) == run.verify_ct
    assert [s.length for s in found.steps] == [length for length, _ in run.steps]
    assert [s.accepted for s in found.steps[:-1]] == [a for _, a in run.steps[:-1]]
    assert sum(s.emitted for s in found.steps) == r - 1 == found.counts.tokens
    uncut = [
        (s, a)
        for s, (_, a) in zip(found.steps, run.steps, strict=True)
        if not s.cut(len(ids), steps)
    ]
    assert all(s.accepted == a for s, a in uncut)
    if not run.verify_ct:
        return 0
    overshoot = 1 + run.num_correct + run.verify_ct - r
    raw, ours = 1 + run.num_correct / run.verify_ct, (r - 1) / run.verify_ct
    assert raw - ours == pytest.approx(overshoot / run.verify_ct)
    assert 0 <= overshoot <= steps
    return overshoot


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_replay_takes_the_steps_of_a_plain_engine(steps: int) -> None:
    target, drafter = trained_pair()
    accepted, overshoots = set(), set()
    for (seed, n_prompt), most in itertools.product(((0, 5), (1, 5), (2, 1)), LENGTHS):
        run = free_run(seed, n_prompt, steps).stopped_at(most)
        overshoots.add(assert_same(run, target, drafter, steps))
        accepted |= {a for _, a in run.steps}
    assert accepted >= {0, 1}, "the drafter is neither hopeless nor perfect, else this shows little"
    if steps == 5:
        assert len(accepted) >= 4
        assert max(overshoots) > 0


def test_a_smaller_limit_stops_the_engine_where_the_test_above_cuts_it() -> None:
    target, drafter = trained_pair()
    for most in (1, 2, 7):
        run = speculate(target, drafter, prompt_of(0, 5), steps=5, max_new_tokens=most)
        assert run == free_run(0, 5, 5).stopped_at(most)


def test_a_stop_token_inside_an_accepted_run_ends_both_alike() -> None:
    target, drafter = trained_pair()
    seen = 0
    for seed in range(3):
        free = free_run(seed, 5, 5)
        for length, a in free.steps:
            start = length - len(free.prompt) + 1
            inside = free.output[start : start + a - 1]
            fresh = [t for t in inside if free.output.index(t) >= start]
            if fresh:
                run = speculate(
                    target, drafter, free.prompt, steps=5, max_new_tokens=40, stop=fresh[0]
                )
                assert run.output[-1] == fresh[0]
                assert assert_same(run, target, drafter, 5) > 0, (
                    "drafts after the stop count as raw"
                )
                seen += 1
                break
    assert seen


def test_speculation_changes_no_token() -> None:
    target, _ = trained_pair()
    for steps in (3, 5):
        run = free_run(0, 5, steps)
        plain = target.greedy(torch.tensor([run.prompt]), 40)[0].tolist()
        assert run.prompt + run.output == plain


def recorded(target: Target, count: int = 6, n_tokens: int = 30) -> list[Sample]:
    texts = target.greedy(torch.tensor([prompt_of(i, 5) for i in range(count)]), n_tokens).tolist()
    return [sample_of(target, ids[: len(ids) - i], 5, f"s{i}-0") for i, ids in enumerate(texts)]


def test_the_last_two_rows_are_never_read() -> None:
    target, drafter = trained_pair()
    [sample] = recorded(target, 1)
    spoilt = sample.features_NW.clone()
    spoilt[-2:] = math.nan
    same = Sample(sample.sample_id, sample.ids_N, sample.n_context, spoilt, None)
    short = Sample(sample.sample_id, sample.ids_N, sample.n_context, spoilt[:-2], None)
    runner = replay(target, drafter, 3)
    expected = runner.drafts([sample], prune=False)[0]
    for other in (same, short):
        assert np.array_equal(runner.drafts([other], prune=False)[0], expected)


def drafter_that_says(rows_RK: np.ndarray, steps: int, ids: list[int], n_context: int) -> list:
    return walk(np.array(ids), n_context, rows_RK[:, :steps])


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("n_response", [1, 2, 3, 7, 40])
def test_a_perfect_drafter_and_a_hopeless_one(steps: int, n_response: int) -> None:
    ids, p = list(range(4 + n_response)), 4
    where = np.arange(p + 1, p + n_response)[:, None] + np.arange(steps)
    perfect = drafter_that_says(where, steps, ids, p)
    assert len(perfect) == math.ceil((n_response - 1) / (steps + 1))
    hopeless = drafter_that_says(where + 1, steps, ids, p)
    assert len(hopeless) == n_response - 1
    assert all(s.emitted == 1 for s in hopeless)


def test_neighbours_packing_and_later_tokens_change_nothing() -> None:
    target, drafter = trained_pair()
    samples = recorded(target)
    runner = replay(target, drafter, 3)
    together = runner.drafts(samples, prune=False)
    alone = [runner.drafts([s], prune=False)[0] for s in samples]
    backwards = runner.drafts(samples[::-1], prune=False)[::-1]
    for a, b, c in zip(together, alone, backwards, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    first = samples[0]
    cut = Sample("cut-0", first.ids_N[:-9], first.n_context, first.features_NW[:-9], None)
    assert np.array_equal(runner.drafts([cut], prune=False)[0], alone[0][:-9])


def test_batches_of_any_size_count_the_same() -> None:
    target, drafter = trained_pair()
    samples = recorded(target)
    one = [r.counts for r in replay(target, drafter, 3).run(samples)]
    many = [r.counts for r in replay(target, drafter, 3, rows_per_batch=40).run(samples)]
    assert one == many
    assert sum(c.steps for c in one) < sum(c.tokens for c in one), "something was accepted"


def test_pruning_leaves_out_only_what_no_walk_reaches() -> None:
    target, drafter = trained_pair()
    samples = recorded(target)
    runner = replay(target, drafter, 4)
    for sample, whole, pruned in zip(
        samples, runner.drafts(samples, prune=False), runner.drafts(samples), strict=True
    ):
        left_out = pruned == NOT_DRAFTED
        assert left_out.any()
        assert np.array_equal(np.where(left_out, whole, pruned), whole)
        ids = sample.ids_N.numpy()
        assert walk(ids, sample.n_context, whole) == walk(ids, sample.n_context, pruned)


def test_tiles_of_the_attention_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = trained_pair()
    samples = recorded(target)
    whole = replay(target, drafter, 3).drafts(samples)
    monkeypatch.setattr("datagen.acceptance.replay.SCORES_AT_ONCE", 400)
    monkeypatch.setattr("datagen.acceptance.replay.LOGITS_AT_ONCE", 100)
    for a, b in zip(whole, replay(target, drafter, 3).drafts(samples), strict=True):
        assert np.array_equal(a, b)


def test_a_token_outside_the_draft_vocabulary_is_never_accepted() -> None:
    target, drafter = trained_pair()
    samples = recorded(target)
    drafts = replay(target, drafter, 3).drafts(samples, prune=False)
    said = {int(t) for d in drafts for t in d.flatten()}
    assert said <= set(drafter.t2d.nonzero().flatten().tolist())
    accepted = next(
        s.ids_N[step.length + 1].item()
        for s, d in zip(samples, drafts, strict=True)
        for step in walk(s.ids_N.numpy(), s.n_context, d)
        if step.accepted
    )
    moved = int((drafter.d2t + torch.arange(len(drafter.d2t)) == accepted).nonzero())
    other = Drafter(drafter.config).double()
    other.load_state_dict(drafter.state_dict())
    outside = next(v for v in range(VOCAB) if not drafter.t2d[v])
    other.d2t[moved] = outside - moved  # the map without the recorded token
    for sample, d in zip(samples, replay(target, other, 3).drafts(samples), strict=True):
        ids = sample.ids_N.numpy()
        for step in walk(ids, sample.n_context, d):
            taken = ids[step.length + 1 : step.length + 1 + step.accepted]
            assert accepted not in taken


def test_sampled_responses_accept_as_often_as_p_of_the_draft() -> None:
    """Over many responses sampled from p, the mean acceptance is the mean of p(d)."""
    target, drafter = trained_pair()
    generator, rounds, temperature = torch.Generator().manual_seed(9), 300, 0.6
    samples, chances = [], []
    for seed in range(8):
        said = target.greedy(torch.tensor([prompt_of(seed, 5)]), 1)[0].tolist()
        boundaries, logits = target(said)
        p = torch.softmax(logits[-1] / temperature, -1)
        for token in torch.multinomial(p, rounds, replacement=True, generator=generator).tolist():
            ids = torch.tensor([*said, token])
            samples.append(Sample(f"s{len(samples)}-0", ids, 5, boundaries, None))
        chances.append(p)
    drafts = replay(target, drafter, 1).drafts(samples, prune=False)
    accepted = [
        walk(s.ids_N.numpy(), 5, d)[0].accepted for s, d in zip(samples, drafts, strict=True)
    ]
    expected = [float(p[int(drafts[i * rounds][0, 0])]) for i, p in enumerate(chances)]
    assert 0.05 < np.mean(expected) < 0.95
    bound = 3 * math.sqrt(0.25 / len(samples))
    assert np.mean(accepted) == pytest.approx(np.mean(expected), abs=bound)


def test_depths_are_censored_at_the_end_and_predict_uncut_steps() -> None:
    target, drafter = trained_pair()
    samples = recorded(target)
    counts = [r.counts for r in replay(target, drafter, 3).run(samples)]
    predicted = predicted_accept_len(conditional_acceptance(counts))
    assert predicted >= sum(c.tokens for c in counts) / sum(c.steps for c in counts) - 0.2
    ids = np.array([0, 1, 2, 3, 4])
    steps = walk(ids, 2, np.array([[3, 4, 9], [9, 9, 9]]))
    only = counts_of(steps, sample_id="a-0", prompt_id="a", ids_N=ids, n_context=2, draft_steps=3)
    assert (only.tokens, only.steps) == (2, 1)
    assert (only.eligible, only.accepted) == ((1, 1, 0), (1, 1, 0))


def test_what_cannot_be_replayed_is_refused() -> None:
    target, drafter = trained_pair()
    [sample] = recorded(target, 1)
    runner = replay(target, drafter, 2)

    def with_features(features: torch.Tensor) -> Sample:
        return Sample("bad-0", sample.ids_N, sample.n_context, features, None)

    with pytest.raises(MeasurementError, match="the context included"):
        runner.drafts([with_features(sample.features_NW[sample.n_context :])])
    with pytest.raises(MeasurementError, match="EAGLE instead of EAGLE3"):
        runner.drafts([with_features(sample.features_NW[:, :HIDDEN])])
    with pytest.raises(MeasurementError, match="no response after a context"):
        runner.drafts([Sample("bad-0", sample.ids_N, len(sample.ids_N), sample.features_NW, None)])
    foreign = sample.ids_N.clone()
    foreign[3] = VOCAB + 5
    with pytest.raises(MeasurementError, match="outside the vocabulary"):
        runner.drafts([Sample("bad-0", foreign, sample.n_context, sample.features_NW, None)])
    with pytest.raises(MeasurementError, match="at least one draft step"):
        replay(target, drafter, 0)
