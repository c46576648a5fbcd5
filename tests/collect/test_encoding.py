"""Encoding happens beside the event loop, a little at a time, and what waits holds back the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from datagen.collect.encoding import (
    QUEUED_PER_THREAD,
    TURN_S,
    EncodePool,
    short_turns,
    threads_for,
    writers_for,
)
from datagen.collect.job import CollectJob
from datagen.collect.workshop import encoders_and_commits
from datagen.config import MIB, collect_config
from datagen.store.encoder import Encoder
from datagen.store.layout import PartitionLayout
from datagen.store.partition import PartitionStore
from datagen.store.states import ShardReader, StatesSpec, encode, fit, to_batch
from datagen.store.threads import usable_cpus
from datagen.store.verify import verify_run
from tests.collect.harness import Bench
from tests.store.rows import (
    DIGEST,
    collect,
    ids_of,
    open_store,
    prompt_id,
    response,
    states_like,
    states_of,
)
from tests.tiny import free_port


class Gate:
    """An encoder that holds every sample until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.inside, self.most = threading.Event(), 0, 0
        lock, original = threading.Lock(), Encoder.__call__

        def held(encoder: Encoder, rows: NDArray[np.uint16]) -> Any:
            with lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            self.opened.wait()
            with lock:
                self.inside -= 1
            return original(encoder, rows)

        monkeypatch.setattr(Encoder, "__call__", held)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - threads set no asyncio event
            await asyncio.sleep(0.005)


async def test_few_samples_are_in_the_pool_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, pool = Gate(monkeypatch), EncodePool(threads=2)
    store = open_store(tmp_path)
    tasks = [
        asyncio.create_task(pool.encode(store.encode, states_like(9, seed=n))) for n in range(12)
    ]
    await until(lambda: gate.inside == 2)  # the loop runs while both threads are held
    assert pool._room.locked()
    gate.opened.set()
    encoded = await asyncio.gather(*tasks)
    assert gate.most == 2
    assert len(encoded) > 2 * QUEUED_PER_THREAD
    assert {e.shape for e in encoded} == {(9, 64)}
    pool.close()
    store.close()


async def test_samples_encoded_at_once_are_stored_as_if_one_after_the_other(tmp_path: Path) -> None:
    pool, store = EncodePool(threads=4), open_store(tmp_path)
    answers = [response(n) for n in range(20)]
    encoded = await asyncio.gather(*(pool.encode(store.encode, states_of(a)) for a in answers))
    pool.close()
    assert len({e.params for e in encoded}) == 1
    for number, (answer, states) in enumerate(zip(answers, encoded, strict=True)):
        store.add_response(answer)
        store.add_states(
            answer.prompt_id, 0, ids_of(answer), len(answer.context_ids), states
        )  # fmt: skip
        if number == 10:
            store.commit()
    store.commit()
    store.close()
    with_reader = open_store(tmp_path)
    assert with_reader.counts().collected == 20
    shard = ShardReader(tmp_path / "states-000.arrow")
    for row, answer in enumerate(answers):
        assert np.array_equal(shard.states(row).reshape(-1, 64), states_of(answer))
    with_reader.close()


SPEC = StatesSpec((1, 3, 4), "post", "BF16", 16, "plane")


def test_a_sample_encoded_for_another_shard_is_encoded_again(tmp_path: Path) -> None:
    store: PartitionStore = open_store(tmp_path)
    collect(store, 0)
    answer = response(1)
    rows = states_of(answer)
    foreign = encode(SPEC, fit(SPEC, rows ^ 0x1000), rows)
    store.add_response(answer)
    store.add_states(prompt_id(1), 0, ids_of(answer), 3, foreign)
    store.seal(2)
    store.close()
    shard = ShardReader(tmp_path / "states-000.arrow")
    assert np.array_equal(shard.states(1).reshape(rows.shape), rows)
    with pytest.raises(ValueError, match="other parameters"):
        to_batch(
            SPEC.schema(fit(SPEC, rows)), prompt_id=prompt_id(1), turn=0, n_context=3,
            input_ids=ids_of(answer), encoded=foreign,
        )  # fmt: skip


async def test_better_parameters_begin_a_new_shard_and_stragglers_are_encoded_again(
    tmp_path: Path,
) -> None:
    encoder = Encoder(SPEC, refit_after=4)
    store = PartitionStore.open(
        PartitionLayout(tmp_path), fingerprint_digest=DIGEST, spec=SPEC, shard_bytes=1 << 30,
        encoder=encoder,
    )  # fmt: skip
    answers = [response(n) for n in range(10)]
    encoded = [store.encode(states_of(a) ^ (n << 7)) for n, a in enumerate(answers)]
    assert [e.params == encoder.params for e in encoded] == [False] * 3 + [True] * 7
    order = [0, 1, 4, 2, 5, 3, 6, 7, 8, 9]  # 2 and 3 come after their better
    for n in order:
        store.add_response(answers[n])
        store.add_states(
            answers[n].prompt_id, 0, ids_of(answers[n]), len(answers[n].context_ids), encoded[n]
        )
    store.seal(10)
    store.close()
    shards = [ShardReader(tmp_path / f"states-{i:03d}.arrow") for i in range(2)]
    assert [len(s) for s in shards] == [2, 8]
    stored = [s.states(row).reshape(-1, SPEC.width) for s in shards for row in range(len(s))]
    for n, states in zip(order, stored, strict=True):
        assert np.array_equal(states, states_of(answers[n]) ^ (n << 7))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("encoding")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.scripted_target", str(port), str(folder / "spool")],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"serving\n"
        yield Bench.make(folder, f"http://127.0.0.1:{port}", prompts=60)
        server.terminate()
        server.wait(60)


async def test_slow_encoding_holds_back_captures_not_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "cache"))
    gate = Gate(monkeypatch)
    config = collect_config(
        accept_risk="boundaries",  # the scripted target draws its states
        run=str(bench.folder / "held"), mix=str(bench.mix), target=str(bench.profile),
        tokenizer=str(bench.checkpoint), partition_prompts=200, spool_mib=1,
    )  # fmt: skip
    limit = MIB // 8
    async with CollectJob.open(config, lambda _: None) as job:
        assert job._shop is not None
        job._shop.budget._limit = limit
        run = asyncio.create_task(job.collect_all())
        await until(lambda: job.progress.tokens_generated == 11 * job.plan.n_samples)
        spooled = [p.stat().st_size for p in (bench.folder / "spool").glob("*.safetensors")]
        assert 0 < sum(spooled) <= limit + 2048 * len(spooled)
        assert job.progress.collected == 0
        assert 0 < job._shop.budget.held <= limit
        gate.opened.set()
        manifest = await run
    assert manifest.samples.pending == 0
    assert manifest.samples.collected == manifest.samples.planned
    assert verify_run(bench.folder / "held").ok


@pytest.mark.parametrize(
    ("said", "cpus"), [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), (None, 16)]
)
def test_a_container_is_asked_for_no_more_cpus_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, cpus: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    quota = tmp_path / "cpu.max"
    if said is not None:
        quota.write_text(said + "\n")
    assert usable_cpus(quota) == cpus


@pytest.mark.parametrize(
    ("cpus", "wide", "threads", "writers"),
    [(1, True, 1, 1), (8, True, 8, 4), (64, True, 16, 8), (64, False, 8, 1), (2, False, 2, 1)],
)
def test_wide_targets_have_more_threads_and_writers(
    monkeypatch: pytest.MonkeyPatch, cpus: int, wide: bool, threads: int, writers: int
) -> None:
    monkeypatch.setattr("datagen.collect.encoding.usable_cpus", lambda: cpus)
    assert (threads_for(wide=wide), writers_for(wide=wide)) == (threads, writers)


@pytest.mark.parametrize(("target", "turn_s"), [("kimi-k2.5", TURN_S), ("smollm2", None)])
async def test_threads_of_a_wide_run_and_of_no_other_take_short_turns(
    target: str, turn_s: float | None
) -> None:
    usual = sys.getswitchinterval()
    assert usual > TURN_S
    with encoders_and_commits(collect_config(target=target)):
        assert sys.getswitchinterval() == pytest.approx(turn_s or usual)
    assert sys.getswitchinterval() == usual


def test_short_turns_of_two_runs_end_with_the_first_that_had_them() -> None:
    usual = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual
