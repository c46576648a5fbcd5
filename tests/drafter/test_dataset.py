"""Reading, packing and order: every sample once an epoch, the same order for ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datagen.drafter.dataset import ManifestSource, SampleRef, first_by_hash, open_sources
from datagen.drafter.loader import Loader
from datagen.drafter.packing import Order, usable
from datagen.drafter.rows import trained_counts
from datagen.errors import ConfigError, CorruptFile
from tests.drafter.run import tiny_target, write_run
from tests.tiny import HIDDEN


def refs(shapes: list[tuple[int, int]], source: int = 0) -> list[SampleRef]:
    return [
        SampleRef(source, 0, i, f"p{source}.{i}-0", f"p{source}.{i}", p + r, p)
        for i, (p, r) in enumerate(shapes)
    ]


def order(data: list[SampleRef], **changes: object) -> Order:
    given = {
        "seed": 3, "batch_tokens": 40, "accumulate": 2, "ranks": 1, "depths": 3, "weights": (1.0,),
    }  # fmt: skip
    return Order(usable(data, 40), **{**given, **changes})  # type: ignore[arg-type]


shapes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 3), st.integers(1, 3))
def test_an_epoch_has_every_usable_sample_once_and_no_batch_is_too_long(
    sizes: list[tuple[int, int]], accumulate: int, ranks: int
) -> None:
    data = usable(refs(sizes), 40)
    if not data.refs:
        with pytest.raises(ConfigError, match="no sample"):
            order(refs(sizes))
        return
    made = order(refs(sizes), accumulate=accumulate, ranks=ranks)
    for epoch in (0, 1):
        first = made.total_steps(epoch)
        steps = [made.step(n) for n in range(first, made.total_steps(epoch + 1))]
        batches = [b for s in steps for rank in s.batches for b in rank]
        assert sorted(n for b in batches for n in b) == list(range(len(data.refs)))
        assert all(sum(data.lengths[n] for n in b) <= 40 for b in batches)
        for s in steps:
            assert s.epoch == epoch
            assert len({len(rank) for rank in s.batches}) == 1, "ranks keep in step"
            numbers = [n for rank in s.batches for b in rank for n in b]
            rows = [trained_counts(data.lengths[n], data.refs[n].n_context, 3) for n in numbers]
            assert list(s.rows) == [sum(r[k] for r in rows) for k in range(3)]
            assert s.tokens == sum(data.lengths[n] for n in numbers)
    assert data.no_row == sum(min(p + r, 40) - p < 2 for p, r in sizes)


def test_a_step_is_known_without_those_before_it_and_depends_on_the_seed() -> None:
    data = refs([(5, 9)] * 50)
    steps = [order(data).step(n) for n in range(20)]
    again = order(data)
    assert [again.step(n) for n in reversed(range(20))] == steps[::-1]
    assert [order(data, seed=4).step(n) for n in range(20)] != steps
    first, second = ([n for b in s.batches[0] for n in b] for s in (steps[0], steps[13]))
    assert first != second


def test_weights_say_how_often_a_source_comes() -> None:
    data = refs([(5, 9)] * 10) + refs([(5, 9)] * 10, source=1)
    made = order(data, weights=(2.0, 0.5))
    steps = [made.step(n) for n in range(made.total_steps(1))]
    numbers = [n for s in steps for b in s.batches[0] for n in b]
    counts = np.bincount(numbers, minlength=20)
    assert (counts[:10] == 2).all()
    assert counts[10:].sum() == 5
    assert counts[10:].max() == 1


def test_subsets_are_nested_and_keep_the_turns_of_a_prompt_together() -> None:
    data = [
        SampleRef(0, 0, i, f"p{i // 2}-{i % 2}", f"p{i // 2}", 10, 5) for i in range(40)
    ]  # fmt: skip
    small, large = first_by_hash(data, 10), first_by_hash(data, 20)
    assert (len(small), len(large)) == (10, 20)
    assert set(small) < set(large) < set(data)
    assert len({r.prompt_id for r in small}) == 5
    assert first_by_hash(data, 0) == first_by_hash(data, 99) == data


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return write_run(folder / "run", tiny_target(folder), train=8, heldout=2)


def test_a_manifest_gives_its_samples_with_their_states(manifest: Path) -> None:
    source = ManifestSource(manifest)
    train = source.index("train", 0)
    assert (len(train), len(source.index("heldout", 0))) == (8, 2)
    ref = train[3]
    whole, cut = source.read(ref, ref.n_tokens), source.read(ref, 7)
    assert whole.final_NH is not None
    assert cut.final_NH is not None
    assert whole.features_NW.shape == (ref.n_tokens, 3 * HIDDEN)
    assert whole.features_NW.dtype == torch.bfloat16
    assert torch.equal(whole.features_NW[:7], cut.features_NW)
    assert torch.equal(whole.final_NH[:7], cut.final_NH)
    assert torch.equal(whole.ids_N[:7], cut.ids_N)


@pytest.mark.parametrize("n_tokens", ["all", 7])
def test_a_sample_trained_on_whole_is_asked_for_at_once(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, n_tokens: str | int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "datagen.store.arrow_batches._Sealed._ask_for",
        lambda _self, index, _begin, _end: asked.append(index),
    )
    source = ManifestSource(manifest)
    refs = source.index("train", 0)[::-1]
    for ref in refs:
        source.read(ref, ref.n_tokens if n_tokens == "all" else 7)
    assert asked == ([ref.row for ref in refs] if n_tokens == "all" else [])


def test_few_shards_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datagen.drafter.dataset.MAX_OPEN", 1)
    source = ManifestSource(write_run(tmp_path / "run", tiny_target(tmp_path), train=4, heldout=2))
    refs = source.index("train", 0) + source.index("heldout", 0)
    assert len({ref.shard for ref in refs}) > 1
    for ref in (*refs, *refs):
        source.ids(ref)
        assert list(source._readers) == [ref.shard]


def test_threads_change_neither_order_nor_content(manifest: Path) -> None:
    source = ManifestSource(manifest)
    data = usable(source.index("train", 0), 64)
    plan = [[0, 1], [2], [3, 4, 5], [6], [7]]
    alone = [Loader([source], data, 3).batch(numbers) for numbers in plan]
    loader = Loader([source], data, 3, threads=3, ahead=4)
    for got, wanted in zip(loader.stream(plan), alone, strict=True):
        assert got.sample_ids == wanted.sample_ids
        assert torch.equal(got.features_MW, wanted.features_MW)


def test_processes_give_the_batches_of_threads_and_their_faults(manifest: Path) -> None:
    source = ManifestSource(manifest)
    data = usable(source.index("train", 0), 1 << 20)
    wrong = replace(data.refs[0], n_context=1)
    data = replace(data, refs=(*data.refs, wrong), lengths=(*data.lengths, data.lengths[0]))
    plan = [(0, 3), (1,), (2, 4, 5), (len(data.refs) - 1,)]
    streams = [
        Loader([source], data, 3, threads=1, pad=(512, 128), processes=p).stream(plan)
        for p in (False, True)
    ]
    for _ in plan[:-1]:
        ours, theirs = (next(s) for s in streams)
        assert ours.sample_ids == theirs.sample_ids
        assert len(ours.tokens_M) == 512
        assert torch.equal(ours.features_MW, theirs.features_MW)
        assert torch.equal(ours.labels_AK, theirs.labels_AK)
    for stream in streams:
        with pytest.raises(CorruptFile, match="no context followed by a response"):
            next(stream)


def test_a_missing_shard_is_one_line_naming_it(tmp_path: Path, manifest: Path) -> None:
    path = write_run(tmp_path / "run", tiny_target(tmp_path), train=2, heldout=1)
    shard = next(path.parent.rglob("states-*.arrow"))
    shard.unlink()
    with pytest.raises(CorruptFile, match=shard.name):
        ManifestSource(path)
    with pytest.raises(ConfigError, match="no manifest"):
        open_sources([])
