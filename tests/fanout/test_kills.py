"""The client killed at random instants, over and over: what is on disk at the end is as if never killed."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from benchmarks.fanout_client import forked
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import RunLayout
from datagen.store.responses import ResponsesReader
from tests.fanout.test_storms import GOOD, http, serving
from tests.forks import FORKS

ROWS, PARTITION, WINDOW, ANSWER_S = 300, 50, 16, 0.02


class Target:
    """A server in a thread of this process that counts the answers that reached a client.

    It gives `most`, and keeps who asks for more waiting.
    """

    def __init__(self) -> None:
        self.served, self.most = 0, math.inf
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready, self._thread = threading.Event(), threading.Thread(target=self._run)

    def __enter__(self) -> Target:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()

        async def reply(_: int, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(ANSWER_S)
            while self.served >= self.most and not writer.is_closing():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(ANSWER_S)
            writer.write(http("200 OK", GOOD))
            self.served += not writer.is_closing()

        async with serving(reply) as self.url:
            self._ready.set()
            await self._over.wait()


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as made:
        yield made


def start(target: Target, run: Path) -> BaseProcess:
    flags = {"rows": ROWS, "partition": PARTITION, "window": WINDOW, "limit": WINDOW, "mean": 8}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    process = FORKS.Process(
        target=forked, args=([*arguments, f"--run={run}", "--urls", target.url],)
    )
    process.start()
    return process


def journaled(run: Path) -> int:
    parts = (RunLayout(run).partition(i) for i in range(ROWS // PARTITION))
    return sum(int((read_journal(p.journal)["kind"] == Kind.RESPONSE).sum()) for p in parts)


def stored(run: Path) -> Counter[tuple[str, bytes]]:
    parts = [RunLayout(run).partition(i) for i in range(ROWS // PARTITION)]
    readers = [ResponsesReader(p.responses(n)) for p in parts for n in p.numbers("responses")]
    return Counter((r.sample_id, r.response_ids.tobytes()) for reader in readers for r in reader)


def test_a_client_killed_ten_times_ends_with_the_rows_of_an_undisturbed_one(
    tmp_path: Path, target: Target
) -> None:
    whole = start(target, tmp_path / "whole")
    whole.join(120)
    assert whole.exitcode == 0
    undisturbed = stored(tmp_path / "whole")
    assert undisturbed.total() == len(undisturbed) == ROWS
    assert target.served == ROWS

    run, rng = tmp_path / "killed", random.Random(10)
    for moment in sorted(rng.uniform(0.02, 0.9) for _ in range(10)):
        asked, had = target.served, journaled(run)
        target.most = asked + ROWS - had - 1  # without the last one no run ends
        process, began = start(target, run), time.monotonic()
        while journaled(run) < moment * ROWS:
            assert process.is_alive()
            assert time.monotonic() - began < 120
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join(60)
        assert process.exitcode == -9
        redone = target.served - asked - (journaled(run) - had)
        assert 0 <= redone <= WINDOW + WINDOW / ANSWER_S
    target.most = math.inf
    process = start(target, run)
    process.join(120)
    assert process.exitcode == 0
    assert stored(run) == undisturbed
