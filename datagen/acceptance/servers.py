"""Starts a server process for one measurement, waits until it answers, and stops it with its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from datagen.acceptance.stopping import Stop, never, require_going
from datagen.errors import MeasurementError
from datagen.target.direct import open_directly

STOP_S = 30.0
# Two servers and their measurement must end before Prefect kills a cancelled flow, at 30 s.
HURRIED_S = 8.0
PR_SET_PDEATHSIG = 1
ERROR = re.compile(r"^[\w.]*(Error|Exception)\b.*: ")


@contextlib.contextmanager
def launched(
    command: Sequence[str], url: str, *, log: Path, start_s: float = 180.0,
    environment: Mapping[str, str] | None = None, stop: Stop = never,
) -> Iterator[str]:  # fmt: skip
    """A server that answers at `url` while the context lasts. Raises MeasurementError, and Interrupted
    once `stop` says so while it starts.

    Its output goes to `log`. It runs in a session of its own, which is ended as a whole; on Linux it
    ends with this process even when that is killed.
    """
    require_going(stop)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **(environment or {})}, preexec_fn=_end_with_parent(),
        )  # fmt: skip
    try:
        _wait_healthy(process, url, log, start_s, stop)
        yield url
    finally:
        _stop(process, HURRIED_S if stop() else STOP_S)


def _end_with_parent() -> Callable[[], None] | None:
    """To be run in the child before its program: ask the kernel for SIGTERM when the parent ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: nothing may be loaded between fork and exec
    parent = os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it was asked for
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _wait_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, start_s: float, stop: Stop
) -> None:
    deadline = time.monotonic() + start_s
    while True:
        require_going(stop)
        if process.poll() is not None:
            raise MeasurementError(
                f"the server ended with {process.returncode}: {last_words(log)}", where=log,
                fix="see its log",
            )  # fmt: skip
        try:
            open_directly(f"{url}/health", 2).close()
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"the server does not answer after {start_s:.0f} s", where=log,
                    fix="see its log",
                ) from None  # fmt: skip
            time.sleep(0.1)
        else:
            return


def last_words(log: Path) -> str:
    """The last error that a server's log names, or its last line.

    SGLang's launcher goes on talking after the scheduler's traceback.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if ERROR.match(line)]
    return (errors or lines or ["no output"])[-1][:300]


def _stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # those that did not end with the first
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
