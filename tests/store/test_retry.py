"""Rejections are taken back by reason; a kill at any point loses and doubles nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from datagen.errors import RetryRefused
from datagen.store import retry as retry_module
from datagen.store.fingerprint import Fingerprint
from datagen.store.journal import SIZE
from datagen.store.layout import RunLayout
from datagen.store.manifest import build_manifest
from datagen.store.partition import Outcome, PartitionStore
from datagen.store.retry import current_rejections, retry_rejected
from datagen.store.run_status import run_status
from datagen.store.verify import verify_run
from tests.store.rows import (
    collect,
    complete_run,
    header,
    open_store,
    prepare_run,
    prompt_id,
    response,
)


def opened(layout: RunLayout, index: int) -> PartitionStore:
    digest = Fingerprint.load(layout.fingerprint).digest
    return open_store(layout.partition(index).root, digest=digest, shard_bytes=4096)


def finish(layout: RunLayout, index: int, numbers: range) -> list[tuple[int, int]]:
    """What a collect does: every pending turn; returns those that were."""
    store, asked = opened(layout, index), []
    for number in numbers:
        for turn in range(2 if number == numbers[0] else 1):
            if store.outcome(prompt_id(number), turn) in (Outcome.PENDING, Outcome.RESPONDED):
                collect(store, number, turn)
                asked.append((number, turn))
    store.seal(len(numbers))
    store.close()
    return asked


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    complete_run(tmp_path / "run")
    return RunLayout(tmp_path / "run")


def test_exactly_the_samples_of_the_reason_are_pending_again(layout: RunLayout) -> None:
    before = {p: p.read_bytes() for p in layout.root.rglob("*-*.arrow")}
    other = layout.partition(1).summary.read_bytes()
    done = retry_rejected(layout, "over_context")
    assert (done.samples, done.followers, done.partitions) == (1, 0, 1)
    assert not layout.manifest.exists()
    assert not layout.partition(0).summary.exists()
    assert layout.partition(1).summary.read_bytes() == other, "other partitions are left alone"
    status = run_status(layout.root)
    assert (status.pending, status.rejected) == (1, {})
    assert verify_run(layout.root).ok
    assert finish(layout, 0, range(4)) == [(3, 0)]
    from datagen.store.plan import Plan

    manifest = build_manifest(layout, Plan.open(layout.plan), header(layout))
    assert (manifest.samples.collected, manifest.samples.rejected) == (10, {})
    assert verify_run(layout.root).ok
    for path, content in before.items():
        assert path.read_bytes() == content


@pytest.mark.parametrize("reason", ["empty_output", "", "earlier_turn"])
def test_a_reason_nobody_was_rejected_with_changes_nothing(layout: RunLayout, reason: str) -> None:
    with pytest.raises(RetryRefused, match=r"over_context \(1\)"):
        retry_rejected(layout, reason)
    assert layout.manifest.exists()
    assert verify_run(layout.root).ok


def reject_both(layout: RunLayout) -> None:
    """Prompt 0 fails at its first turn, so that its second falls with it."""
    store = opened(layout, 0)
    store.add_rejection(prompt_id(0), 0, "generate", "empty_output", "0 tokens", 3)
    store.add_rejection(prompt_id(0), 1, "generate", "earlier_turn", "turn 0: empty_output", 0)
    store.seal(1)
    store.close()


def test_turns_that_fell_with_it_are_pending_again_too(tmp_path: Path) -> None:
    layout, _ = prepare_run(tmp_path / "run", partitions=1, prompts=1)
    reject_both(layout)
    with pytest.raises(RetryRefused, match=r"follow a rejected one.*empty_output \(1\)"):
        retry_rejected(layout, "earlier_turn")
    done = retry_rejected(layout, "empty_output")
    assert (done.samples, done.followers) == (1, 1)
    assert run_status(layout.root).pending == 2
    assert finish(layout, 0, range(1)) == [(0, 0), (0, 1)]
    assert verify_run(layout.root).ok


def test_what_a_torn_tail_left_behind_is_taken_up_by_the_same_command(tmp_path: Path) -> None:
    layout, _ = prepare_run(tmp_path / "run", partitions=1, prompts=1)
    reject_both(layout)
    retry_rejected(layout, "empty_output")
    journal = layout.partition(0).journal
    journal.write_bytes(journal.read_bytes()[: -SIZE + 10])
    assert run_status(layout.root).rejected == {"earlier_turn": 1}
    done = retry_rejected(layout, "empty_output")
    assert (done.samples, done.followers) == (0, 1)
    assert run_status(layout.root).pending == 2


def test_a_rejection_may_be_taken_back_again_and_again(layout: RunLayout) -> None:
    for reason in ("over_context", "empty_output", "empty_output"):
        retry_rejected(layout, reason)
        store = opened(layout, 0)
        store.add_rejection(prompt_id(3), 0, "generate", "empty_output", "0 tokens", 1)
        store.seal(4)
        store.close()
    assert run_status(layout.root).rejected == {"empty_output": 1}
    digest = Fingerprint.load(layout.fingerprint).digest
    assert {k[0] for k in current_rejections(layout.partition(0), digest)} == {prompt_id(3)}
    assert verify_run(layout.root).ok


def test_a_response_kept_by_a_rejected_capture_is_not_asked_for_again(tmp_path: Path) -> None:
    layout, _ = prepare_run(tmp_path / "run", partitions=1, prompts=1)
    store = opened(layout, 0)
    collect(store, 0, 0)
    answer = response(0, 1)
    store.add_response(answer)
    store.add_rejection(answer.prompt_id, 1, "capture", "states_not_finite", "NaN", 3)
    store.seal(1)
    store.close()
    retry_rejected(layout, "states_not_finite")
    store = opened(layout, 0)
    assert store.outcome(answer.prompt_id, 1) is Outcome.RESPONDED
    store.close()
    assert finish(layout, 0, range(1)) == [(0, 1)]
    assert verify_run(layout.root).ok


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_kill_between_its_steps_leaves_a_run_that_goes_on(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Killed before the manifest, before the seal, before the tombstones."""
    steps = 0

    def step(real):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            nonlocal steps
            if steps == at:
                raise KeyboardInterrupt
            steps += 1
            return real(*args)

        return call

    monkeypatch.setattr(retry_module, "unlink_durably", step(retry_module.unlink_durably))
    monkeypatch.setattr(retry_module.Journal, "open", step(retry_module.Journal.open))
    with pytest.raises(KeyboardInterrupt):
        retry_rejected(layout, "over_context")
    monkeypatch.undo()
    assert verify_run(layout.root).ok
    assert run_status(layout.root).rejected == {"over_context": 1}
    retry_rejected(layout, "over_context")
    assert finish(layout, 0, range(4)) == [(3, 0)]
