"""Embedded servers that are wrong, or unusual, in one way; forked from a process that has torch already."""

from __future__ import annotations

import multiprocessing
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datagen.embedded.faults import VARIABLE
from tests.tiny import BOUNDARIES, free_port


def _serve(target: str, port: int, spool: Path, fault: str) -> None:
    """In a process forked from one that has torch already: a server starts in a moment."""
    from datagen.embedded.server import serve

    os.environ[VARIABLE] = fault
    serve(
        target=target, port=port, threads=1, spool_dir=spool, boundaries=BOUNDARIES, dtype="float32"
    )


@contextmanager
def faulty(checkpoint: Path, folder: Path, fault: str) -> Iterator[str]:
    """The URL of a server that is wrong in one way."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["datagen.embedded.server"])
    port = free_port()
    process = context.Process(
        target=_serve, args=(str(checkpoint), port, folder / "spool", fault), daemon=True
    )
    process.start()
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=10).close()
                break
            except OSError:
                assert process.is_alive(), "the server ended"
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.join(30)
