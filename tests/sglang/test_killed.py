"""The server dies in the middle of captures."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from datagen.capture.spool import SUFFIX, read_spool, sweep
from tests.sglang.asking import capture, conversations
from tests.sglang.conftest import CAPTURE_FLAGS, RealEngine


def test_a_killed_server_leaves_no_half_file_and_a_spool_that_sweeps_clean(
    real_engine: RealEngine,
) -> None:
    server = real_engine.server("killed", *CAPTURE_FLAGS)
    spool = server.log.parent / "spool"
    asked = conversations(60, 200)

    def ask(ids: list[int]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the server is dying
            capture(server.url, ids)

    try:
        server.start()
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(ask, ids) for ids in asked]
            deadline = time.monotonic() + 120
            while len(os.listdir(spool)) < 5 and time.monotonic() < deadline:
                time.sleep(0.005)
            server.stop(signal.SIGKILL)
            for w in waiting:
                w.result(60)
    finally:
        server.stop(signal.SIGKILL)
    whole = [p for p in spool.iterdir() if p.name.endswith(SUFFIX)]
    assert whole
    assert len(whole) < len(asked)
    for path in whole:
        spooled = read_spool(path)
        assert list(spooled.input_ids) in asked
    sweep(spool, older_than_s=0, now=time.time() + 120)
    assert not os.listdir(spool)
