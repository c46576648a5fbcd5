"""The server dies in the middle of captures."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

from datagen.capture.spool import SUFFIX, read_spool, sweep
from tests.sglang.asking import capture, conversations
from tests.sglang.conftest import CAPTURE_FLAGS, RealEngine
from tests.tiny import VOCAB, serving, write_tiny_checkpoint


def kill_among_captures(
    url: str, spool: Path, asked: list[list[int]], kill: Callable[[], object], at_least: int
) -> None:
    """Ask for captures, kill the server once some are there, and hold what is left to the contract."""

    def ask(ids: list[int]) -> None:
        with contextlib.suppress(OSError, ValueError, HTTPException):  # the server is dying
            capture(url, ids)

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, ids) for ids in asked]
        deadline = time.monotonic() + 200
        while len(os.listdir(spool)) < at_least and time.monotonic() < deadline:
            time.sleep(0.002)
        kill()
        for w in waiting:
            w.result(60)
    whole = [p for p in spool.iterdir() if p.name.endswith(SUFFIX)]
    assert at_least - 1 <= len(whole) < len(asked)
    for path in whole:
        assert list(read_spool(path).input_ids) in asked
    sweep(spool, older_than_s=0, now=time.time() + 120)
    assert not os.listdir(spool)


def test_a_killed_embedded_server_leaves_no_half_file(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny-llama")
    draw = random.Random(0)
    asked = [[draw.randrange(3, VOCAB) for _ in range(900)] for _ in range(60)]
    with serving(str(checkpoint), tmp_path) as process:
        spool = tmp_path / "spool"
        kill_among_captures(process.url, spool, asked, lambda: process.kill(signal.SIGKILL), 5)


def test_a_killed_sglang_leaves_no_half_file(real_engine: RealEngine) -> None:
    server = real_engine.server("killed", *CAPTURE_FLAGS)
    try:
        server.start()
        spool = server.log.parent / "spool"
        asked = conversations(60, 120)
        kill_among_captures(server.url, spool, asked, lambda: server.stop(signal.SIGKILL), 4)
    finally:
        server.stop(signal.SIGKILL)
