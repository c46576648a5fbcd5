"""Processes that encode: the same shards as threads make, whoever dies, and nobody is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datagen.capture.spool import SpoolError, write_spool
from datagen.collect import encode_processes, encode_worker
from datagen.collect.encode_processes import BLOCKS, EncodeProcesses
from datagen.collect.encoding import processes_for, writers_for
from datagen.config import collect_config
from datagen.errors import EncodingFailed
from datagen.store.codecs import REGISTRY, Encoded
from datagen.store.encoder import Encoder
from datagen.store.guards import Refused, Sound, examine
from datagen.store.states import StatesSpec, encode
from datagen.target.profile import load_profile
from datagen.target.states import Captured
from tests.store.rows import open_store, states_like

SPEC = StatesSpec((1, 3, 4), "post", "BF16", 16, "plane")


def spooled(folder: Path, rows_TW: np.ndarray, name: str = "x") -> Captured:
    """A capture as an engine leaves it; its rows mapped by nobody yet."""
    path, n = folder / f"{name}.safetensors", len(rows_TW)
    write_spool(
        path, rows=[rows_TW.tobytes()], n_tokens=n, width=rows_TW.shape[1], dtype="BF16",
        input_ids=bytes(4 * n),
        metadata={"rid": name, "boundaries": "1,3,4", "hidden": "16", "final_norm": "post", "server": "s"},
    )  # fmt: skip
    return Captured(rows_TW, path)


@contextlib.asynccontextmanager
async def processes(count: int = 1, spec: StatesSpec = SPEC) -> AsyncIterator[EncodeProcesses]:
    pool = EncodeProcesses(spec, count)
    try:
        async with asyncio.timeout(60):
            yield pool
    finally:
        pids = pool.pids
        pool.close()
        assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("codec", sorted(REGISTRY))
async def test_they_encode_to_the_byte_what_threads_encode(tmp_path: Path, codec: str) -> None:
    spec = StatesSpec((1, 3, 4), "post", "BF16", 16, codec)
    store = open_store(tmp_path / "store")
    store.encode = Encoder(spec)
    async with processes(spec=spec) as pool:
        for n in (9, 700, 3, 1100):
            captured = spooled(tmp_path, states_like(n, seed=n), f"s{n}")
            assert await pool.examine(captured, n, spec) == examine(captured.rows, n, spec)
            found = await pool.encode(store, captured)
            params = store.encode.params
            assert params is not None
            due = encode(spec, params, captured.rows)
            assert [bytes(f) for f in found.exp] == [bytes(f) for f in due.exp]
            assert bytes(found.sm) == bytes(due.sm)
            assert (found.params, found.shape) == (due.params, due.shape)
    store.close()


async def test_torn_and_refused_captures_are_told_apart(tmp_path: Path) -> None:
    rows = states_like(20, seed=1)
    bad = rows.copy()
    bad[3, 5] = 0x7FC0
    async with processes() as pool:
        assert isinstance(await pool.examine(spooled(tmp_path, rows), 20, SPEC), Sound)
        refused = await pool.examine(spooled(tmp_path, bad, "bad"), 20, SPEC)
        assert isinstance(refused, Refused)
        assert refused.reason == "states_not_finite"
        torn = spooled(tmp_path, rows, "torn")
        assert torn.path is not None
        content = bytearray(torn.path.read_bytes())
        content[-200] ^= 1
        torn.path.write_bytes(content)
        with pytest.raises(SpoolError, match="checksum"):
            await pool.examine(torn, 20, SPEC)
        torn.path.unlink()
        with pytest.raises(SpoolError, match="gone"):
            await pool.examine(torn, 20, SPEC)


async def test_a_capture_swept_before_its_turn_is_encoded_from_what_is_mapped(
    tmp_path: Path,
) -> None:
    store, rows = open_store(tmp_path / "store"), states_like(30, seed=2)
    async with processes() as pool:
        first = await pool.encode(store, spooled(tmp_path, rows))
        gone = spooled(tmp_path, rows, "gone")
        assert gone.path is not None
        gone.path.unlink()
        again = await pool.encode(store, gone)
        assert bytes(again.sm) == bytes(first.sm)
    store.close()


async def test_what_is_encoded_and_not_written_is_bounded_and_never_overwritten(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "store")
    store.encode(states_like(50, seed=0))
    rows = [states_like(50, seed=n) for n in range(5)]
    async with processes() as pool:
        held = [
            await pool.encode(store, spooled(tmp_path, r, f"s{n}"))
            for n, r in enumerate(rows[:BLOCKS])
        ]
        next_one = asyncio.create_task(pool.encode(store, spooled(tmp_path, rows[-1], "next")))
        await asyncio.sleep(0.1)
        assert not next_one.done()
        assert isinstance(  # looking needs no room
            await pool.examine(spooled(tmp_path, rows[3], "s3"), 50, SPEC), Sound
        )
        params = store.encode.params
        assert params is not None
        for encoded, r in zip(held, rows, strict=False):
            assert bytes(encoded.sm) == bytes(encode(SPEC, params, r).sm)
        kept = held[1].exp[0]  # a part of what was lent keeps the whole
        held.clear()
        del encoded
        assert bytes((await next_one).sm) == bytes(encode(SPEC, params, rows[-1]).sm)
        assert bytes(kept) == bytes(encode(SPEC, params, rows[1]).exp[0])
    store.close()


async def test_a_killed_process_is_replaced_and_its_job_done(tmp_path: Path) -> None:
    store, rows = open_store(tmp_path / "store"), states_like(40, seed=3)
    store.encode(rows)
    async with processes(2) as pool:
        captured = spooled(tmp_path, rows)
        await pool.examine(captured, 40, SPEC)
        before = pool.pids
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(pool.encode(store, captured)) for _ in range(6)]
        await asyncio.sleep(0.05)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        encoded = [await task for task in waiting[:2]]
        assert {bytes(e.sm) for e in encoded} == {bytes(encode(SPEC, encoded[0].params, rows).sm)}
        assert not set(before) & set(pool.pids)
        del encoded
        waiting[:2] = []
        while waiting:
            await waiting.pop(0)
    store.close()


async def test_a_capture_over_which_two_processes_die_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_processes, "LOOK_PATIENCE_S", 0.0)  # every job takes too long
    async with processes() as pool:
        with pytest.raises(EncodingFailed, match="two processes died over one capture") as error:
            await pool.examine(spooled(tmp_path, states_like(9, seed=1)), 9, SPEC)
        assert "signal 9" in str(error.value)
        assert "x.safetensors" in str(error.value)


async def test_a_process_that_cannot_be_replaced_is_an_error_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with processes() as pool:
        captured = spooled(tmp_path, states_like(9, seed=1))
        assert isinstance(await pool.examine(captured, 9, SPEC), Sound)

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        monkeypatch.setattr("datagen.collect.encode_processes.subprocess.Popen", refused)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        under_way = asyncio.create_task(pool.examine(captured, 9, SPEC))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        for asked in (under_way, pool.examine(captured, 9, SPEC)):
            with pytest.raises(EncodingFailed, match=r"no other can be started.*no memory"):
                await asked
    with pytest.raises(EncodingFailed, match=r"no process can be started.*no memory"):
        EncodeProcesses(SPEC, 2)


async def test_what_cannot_be_mapped_is_an_error_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    store.encode(states_like(50, seed=0))
    async with processes() as pool:
        captured = spooled(tmp_path, states_like(50, seed=1))
        await pool.examine(captured, 50, SPEC)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as taken:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(EncodingFailed, match="cannot be mapped"):
                await pool.encode(store, captured)
        assert isinstance(await pool.encode(store, captured), Encoded)
    store.close()


async def test_they_end_at_once_whatever_they_do(tmp_path: Path) -> None:
    pool = EncodeProcesses(SPEC, 2)
    await pool.examine(spooled(tmp_path, states_like(9, seed=1)), 9, SPEC)
    pids = pool.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 2
    assert not any(map(alive, pids))


def test_a_block_gives_back_what_one_long_sample_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_worker, "KEPT_BYTES", 1 << 20)
    fd = os.memfd_create("block")
    block = encode_worker.Block(fd)
    block.fill([bytes(3 << 20)])
    block.shrink()
    assert os.fstat(fd).st_size == 1 << 20
    block.fill([b"a" * (2 << 20)])
    assert os.pread(fd, 4, (2 << 20) - 4) == b"aaaa"
    os.close(fd)


async def test_processes_that_cannot_begin_are_an_error_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with processes() as pool:
        captured = spooled(tmp_path, states_like(9, seed=1))
        for _ in range(2):
            with pytest.raises(EncodingFailed, match="ended with 1 before it could begin"):
                await pool.examine(captured, 9, SPEC)


async def test_who_goes_away_leaves_no_block_lent(tmp_path: Path) -> None:
    store, rows = open_store(tmp_path / "store"), states_like(40, seed=3)
    store.encode(rows)
    async with processes() as pool:
        captured = spooled(tmp_path, rows)
        await pool.examine(captured, 40, SPEC)
        for _ in range(3 * BLOCKS):
            task = asyncio.create_task(pool.encode(store, captured))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert bytes((await pool.encode(store, captured)).sm)
    store.close()


ORPHANS = """
import asyncio, os, signal
from datagen.collect.encode_processes import EncodeProcesses
from datagen.store.states import StatesSpec
async def main():
    pool = EncodeProcesses(StatesSpec((1, 3, 4), "post", "BF16", 16, "plane"), 2)
    print(*pool.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_none_outlives_a_killed_collector() -> None:
    died = subprocess.run(
        [sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert died.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in died.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_laptop_and_a_narrow_target_keep_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [load_profile(name).wide for name in ("kimi-k2.5", "smollm2")] == [True, False]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert processes_for(None, wide=True) == 10
    assert writers_for(10) == 4
    assert processes_for(None, wide=False) == 0
    assert processes_for(0, wide=True) == 0
    assert processes_for(3, wide=False) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert processes_for(None, wide=True) == 0
    assert writers_for(0) == 1
    spools = [collect_config(target=name).spool_mib for name in ("kimi-k2.5", "smollm2")]
    assert spools == [8192, 1024]
    assert collect_config(target="kimi-k2.5", spool_mib=512).spool_mib == 512


async def test_they_run_the_code_of_the_collector_not_what_lies_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datagen").mkdir()
    (tmp_path / "datagen" / "__init__.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    async with processes() as pool:
        found = await pool.examine(spooled(tmp_path, states_like(9, seed=1)), 9, SPEC)
    assert isinstance(found, Sound)


async def test_they_import_from_where_the_collector_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an embedding program put first on its path hides what PYTHONPATH names, at both ends."""
    (tmp_path / "zstandard").mkdir()
    (tmp_path / "zstandard" / "__init__.py").write_text("raise SystemExit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with processes() as pool:
        found = await pool.examine(spooled(tmp_path, states_like(9, seed=1)), 9, SPEC)
    assert isinstance(found, Sound)
