"""A server that is started for a measurement is stopped with it, whatever ends the measurement."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datagen.acceptance import servers
from datagen.acceptance.servers import last_words, launched
from datagen.acceptance.stopping import never, run_until
from datagen.errors import Interrupted, MeasurementError
from tests.tiny import free_port

HEALTHY = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()
"""
HOLDER = """
import sys, time
from pathlib import Path
from datagen.acceptance.servers import launched
port, log, code = sys.argv[1:]
with launched([sys.executable, '-c', code, port], f'http://127.0.0.1:{port}', log=Path(log)):
    print('up', flush=True)
    time.sleep(60)
"""


def listens(port: int) -> bool:
    import socket

    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_lives_as_long_as_the_measurement(tmp_path: Path) -> None:
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    with launched([sys.executable, "-c", HEALTHY, str(port)], url, log=log) as found:
        assert found == url
        assert listens(port)
    assert not listens(port)


def test_a_proxy_of_the_environment_is_not_asked_for_a_server_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    with launched([sys.executable, "-c", HEALTHY, str(port)], url, log=log):
        assert listens(port)


def test_a_server_that_ends_at_once_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no weights'); sys.exit(3)"]
    with (
        pytest.raises(MeasurementError, match="the server ended with 3: no weights"),
        launched(command, "http://127.0.0.1:9", log=tmp_path / "log"),
    ):
        pass


def test_the_error_is_found_behind_what_a_launcher_says_after_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Traceback\n  File x\nRuntimeError: no kernel\n\n[13:22] kill_process_tree called\n"
    )
    assert last_words(log) == "RuntimeError: no kernel"
    log.write_text("")
    assert last_words(log) == "no output"


def test_a_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    url = f"http://127.0.0.1:{free_port()}"
    with (
        pytest.raises(MeasurementError, match="does not answer after 1 s"),
        launched(command, url, log=tmp_path / "log", start_s=1.0),
    ):
        pass


def test_what_a_server_started_ends_with_it(tmp_path: Path) -> None:
    """Its own child ignores SIGTERM, as a scheduler that is busy does, and holds the GPU's memory."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True)\n" + HEALTHY
    )
    port, log = free_port(), tmp_path / "log"
    with launched([sys.executable, "-c", parent, str(port)], f"http://127.0.0.1:{port}", log=log):
        pid = int(log.read_text().split()[0])
        assert _runs(pid)
    deadline = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < deadline, "the child outlived its server"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Zombies that wait for the init process do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel of Linux ends children with parents"
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_measurement_leaves_no_server(tmp_path: Path, number: int) -> None:
    port = free_port()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(port), str(tmp_path / "log"), HEALTHY],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    os.kill(holder.pid, number)
    holder.wait(30)
    holder.stdout.close()
    deadline = time.monotonic() + 60
    while listens(port):
        assert time.monotonic() < deadline, "the server outlived the measurement"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_a_server_whose_measurement_died_before_it_was_asked_for_ends_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(servers.os, "getpid", lambda: 1)  # the parent: by then another one has it
        ask = servers._end_with_parent()
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=ask
    ) as p:
        assert p.wait(30) == -signal.SIGKILL


def test_a_measurement_that_is_stopped_ends_its_server_while_it_starts(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(60)"
    began = time.monotonic()
    with (
        pytest.raises(Interrupted, match="stopped on request"),
        launched(
            [sys.executable, "-c", code], "http://127.0.0.1:9", log=tmp_path / "log",
            stop=lambda: time.monotonic() - began > 0.5,
        ),
    ):  # fmt: skip
        pass
    assert time.monotonic() - began < 40, "it would not have ended by itself"


def test_a_measurement_that_is_stopped_is_cancelled_and_cleans_up() -> None:
    cleaned: list[bool] = []

    async def waits_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    began = time.monotonic()
    with pytest.raises(Interrupted):
        run_until(lambda: time.monotonic() - began > 0.3, waits_for_ever())
    assert cleaned == [True]

    async def answers() -> int:
        await asyncio.sleep(0.01)
        return 7

    assert run_until(never, answers()) == 7
