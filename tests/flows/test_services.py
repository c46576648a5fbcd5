"""Background processes: started once, found again, never confused with anybody else's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datagen.errors import ServiceFailed
from flows import processes
from flows.processes import (
    Service,
    ensure,
    holder,
    is_healthy,
    orphans_live,
    start,
    stop,
    wait_ready,
)
from tests.tiny import free_port

ANSWERS = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"home": "/elsewhere"}'
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

Make = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Services of a checkout, each a small web server; all are killed at the end."""
    made: list[Service] = []

    def service(*flags: str, name: str = "server", port: int | None = None) -> Service:
        port = port or free_port()
        command = (sys.executable, "-c", ANSWERS, str(port), *flags)
        made.append(Service(name, tmp_path, command, f"http://127.0.0.1:{port}", is_healthy))
        return made[-1]

    yield service
    for service_made in made:
        if (pid := holder(service_made.pid_file)) is not None:
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(service: Service) -> None:
    deadline = time.monotonic() + 60
    while holder(service.pid_file) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_service_is_started_once_and_found_again(make: Make) -> None:
    service = make()
    assert start(service)
    wait_ready(service)
    pid = holder(service.pid_file)
    assert not start(service)
    assert holder(service.pid_file) == pid
    assert stop(service) == pid
    assert holder(service.pid_file) is None
    assert stop(service) is None


def test_a_pid_file_of_a_dead_process_is_not_believed_even_if_the_pid_lives(make: Make) -> None:
    service = make()
    service.pid_file.write_text(str(os.getpid()))
    assert holder(service.pid_file) is None
    assert start(service)
    wait_ready(service)
    assert holder(service.pid_file) != os.getpid()


def test_a_killed_service_is_started_again(make: Make) -> None:
    service = make()
    start(service)
    wait_ready(service)
    pid = holder(service.pid_file)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(service)
    assert start(service)
    wait_ready(service)


@pytest.fixture
def parent(make: Make) -> tuple[Service, int]:
    """A running service, and the pid of its child."""
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid, flush=True); p.wait()"
    )
    service = replace(
        make(),
        command=(sys.executable, "-c", code),
        ready=lambda s: s.log.read_text().endswith("\n"),
    )
    start(service)
    wait_ready(service)
    return service, int(service.log.read_text())


def kill(service: Service) -> int:
    pid = holder(service.pid_file)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(service)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return pid


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_service_found_in_its_last_moments_is_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make()
    ensure(service)
    pid = holder(service.pid_file)
    assert pid is not None

    def die_as_soon_as_it_was_seen(_: Path, alive: list[bool] = [True]) -> int | None:  # noqa: B006
        if alive:
            alive.clear()
            os.kill(pid, signal.SIGKILL)
            return pid
        return real_holder(service.pid_file)

    real_holder = processes.holder
    monkeypatch.setattr(processes, "holder", die_as_soon_as_it_was_seen)
    assert ensure(service)
    assert real_holder(service.pid_file) not in (None, pid)


def test_an_orphan_of_a_killed_service_does_not_pass_for_it(parent: tuple[Service, int]) -> None:
    service, child = parent
    kill(service)
    assert is_alive(child)
    assert orphans_live(service)
    assert holder(service.pid_file) is None
    stop(service)
    assert not orphans_live(service)


def test_down_ends_the_children_too(parent: tuple[Service, int]) -> None:
    service, child = parent
    assert stop(service) is not None
    assert not is_alive(child)


def test_down_ends_the_orphans_of_a_killed_service(parent: tuple[Service, int]) -> None:
    service, child = parent
    kill(service)
    assert stop(service) is None
    assert not is_alive(child)


def test_children_that_end_by_themselves_just_then_are_no_fault(
    parent: tuple[Service, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first signal, and between the last look and the second."""
    service, child = parent
    leader = kill(service)
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not processes._group_ended(leader):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr(processes, "ORPHANS_STOP_S", 0)
    monkeypatch.setattr(processes, "_group_ended", lambda _: False)
    stop(service)
    assert not service.pid_file.exists()


def test_a_service_that_ignores_term_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_S", 0.5)
    service = make("deaf")
    start(service)
    wait_ready(service)
    assert stop(service) is not None
    assert holder(service.pid_file) is None


def test_a_service_that_dies_at_once_is_reported_with_its_last_words(make: Make) -> None:
    service = replace(make(), command=(sys.executable, "-c", "raise SystemExit('no such model')"))
    start(service)
    with pytest.raises(ServiceFailed, match="no such model") as e:
        wait_ready(service)
    assert str(service.log) in str(e.value)


def test_another_checkouts_server_on_the_port_is_named(make: Make, tmp_path: Path) -> None:
    theirs = make(name="theirs")
    start(theirs)
    wait_ready(theirs)
    port = int(theirs.address.rsplit(":", 1)[1])
    ours = make(port=port)
    with pytest.raises(ServiceFailed) as e:
        start(ours)
    assert f"port {port} is taken by the Prefect server of /elsewhere" in str(e.value)
    assert f"PREFECT_PORT={port + 1}" in str(e.value)
    assert holder(theirs.pid_file) is not None


def test_a_port_held_by_another_program_is_named(make: Make) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = int(s.getsockname()[1])
        with pytest.raises(ServiceFailed, match=rf"port {port} is taken by another program"):
            start(make(name="target", port=port))


def test_a_service_that_runs_for_another_port_is_not_taken_for_the_wanted_one(make: Make) -> None:
    first = make()
    start(first)
    wait_ready(first)
    with pytest.raises(ServiceFailed, match=r"make down"):
        start(make())


def test_down_without_anything_running_succeeds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.services", "down", "--home", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_status_shows_what_is_down(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.services", "status", "--home", str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["server", "down"],
        ["flows", "down"],
        ["target", "down"],
    ]


def test_serving_without_a_prefect_server_says_make_up(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.serve"],
        env={**os.environ, "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "run `make up`" in done.stderr


def test_a_process_killed_a_moment_ago_holds_nothing(tmp_path: Path) -> None:
    program = """
        import threading, time
        memory = bytearray(1 << 27)
        for _ in range(8):
            threading.Thread(target=time.sleep, args=(60,)).start()
        print("ready", flush=True)
    """
    for attempt in range(5):
        pid_file = tmp_path / f"{attempt}.pid"
        lock = os.open(pid_file, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE,
            pass_fds=[lock],
        )
        pid_file.write_text(str(process.pid))
        os.close(lock)
        assert process.stdout is not None
        process.stdout.readline()
        assert holder(pid_file) == process.pid
        process.kill()
        assert holder(pid_file) is None, "though the kernel may not have ended it yet"
        process.wait()
        process.stdout.close()
