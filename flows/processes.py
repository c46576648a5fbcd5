"""A background process that is started once, found again, and stopped with its children.

It holds an flock on its pid file through a descriptor it inherits, so a pid is believed only while
its lock is held: stale files, reused pids and another checkout's processes never confuse us.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datagen.errors import ServiceFailed
from datagen.target.direct import open_directly

START_S = 180.0
STOP_S = 35.0  # a flow has 30 s to flush
ORPHANS_STOP_S = 10.0
PORT_FREED_S = 1.0


@dataclass(frozen=True, slots=True)
class Service:
    """A background process. `address` is what it was started for: it decides whether to reuse it."""

    name: str
    home: Path
    command: tuple[str, ...]
    address: str
    ready: Callable[[Service], bool]

    @property
    def pid_file(self) -> Path:
        """Locked by the process itself, for as long as it lives."""
        return self.home / f"{self.name}.pid"

    @property
    def address_file(self) -> Path:
        """What the running process was started for."""
        return self.home / f"{self.name}.address"

    @property
    def log(self) -> Path:
        """Its output, from its last start."""
        return self.home / f"{self.name}.log"


def holder(pid_file: Path) -> int | None:
    """The pid of the live process that holds `pid_file`, or None."""
    try:
        fd = os.open(pid_file, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _recorded(pid_file)
        if pid is not None and _dying(pid):
            fcntl.flock(fd, fcntl.LOCK_EX)  # the kernel frees it in a moment
            return None
        return pid
    else:
        return None
    finally:
        os.close(fd)


def _dying(pid: int) -> bool:
    """Whether SIGKILL has been sent to `pid`: on a busy machine it may hold its files a while yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return False  # gone, or a system without /proc
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", status, re.MULTILINE)
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def start(service: Service) -> bool:
    """Start `service` unless it runs; True when it was started now.

    Raises ServiceFailed when it runs for another address, or when its port is another's.
    """
    pid = holder(service.pid_file)
    if pid is None:
        _refuse_foreign(service)
        _spawn(service)
    elif (running := service.address_file.read_text(encoding="utf-8")) != service.address:
        raise ServiceFailed(
            f"the {service.name} process already runs for {running}, not {service.address}",
            where=f"pid {pid}",
            fix="`make down` first",
        )
    return pid is None


def wait_ready(service: Service) -> None:
    """Return once `service` is ready. Raises ServiceFailed when it dies, or takes too long."""
    deadline = time.monotonic() + START_S
    while not service.ready(service):
        if holder(service.pid_file) is None:
            raise ServiceFailed(
                f"the {service.name} process ended: {_last_line(service.log)}", where=service.log
            )
        if time.monotonic() > deadline:
            raise ServiceFailed(
                f"the {service.name} process is not ready after {START_S:.0f} s",
                where=service.log,
                fix="`make down`, then `make up`",
            )
        time.sleep(0.1)


def ensure(service: Service) -> bool:
    """Start `service` unless it runs, and wait until it is ready; True when it was started now.

    One that is found in its last moments, just killed, is started again. Raises ServiceFailed.
    """
    started = start(service)
    try:
        wait_ready(service)
    except ServiceFailed:
        if started or holder(service.pid_file) is not None:
            raise
        started = start(service)
        wait_ready(service)
    return started


def orphans_live(service: Service) -> bool:
    """Whether children of a dead `service` go on without it."""
    dead = _recorded(service.pid_file)
    return dead is not None and not _exists(dead) and not _group_ended(dead)


def is_healthy(service: Service) -> bool:
    """Whether its /health answers."""
    try:
        with open_directly(f"{service.address}/health", 3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def stop(service: Service) -> int | None:
    """Stop `service` and its children: TERM, then KILL after the grace period. Its pid if it ran."""
    pid = holder(service.pid_file)
    if pid is not None:
        _signal(os.kill, pid, signal.SIGTERM)
        if not _within(STOP_S, lambda: holder(service.pid_file) != pid):
            _signal(os.kill, pid, signal.SIGKILL)
            _within(STOP_S, lambda: holder(service.pid_file) != pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # ours only where one process starts and stops it
        _end_group(pid)
    elif (dead := _recorded(service.pid_file)) is not None and not _exists(dead):
        _end_group(dead)  # while a member lives, no new process gets the number of its group
    service.pid_file.unlink(missing_ok=True)
    service.address_file.unlink(missing_ok=True)
    return pid


def _end_group(leader: int) -> None:
    """End what a dead leader left: a flow that cannot reach its Prefect server waits for ever."""
    _signal(os.killpg, leader, signal.SIGTERM)
    if not _within(ORPHANS_STOP_S, lambda: _group_ended(leader)):
        _signal(os.killpg, leader, signal.SIGKILL)


def _signal(send: Callable[[int, int], None], number: int, what: int) -> None:
    """To one that may end by itself just now."""
    with contextlib.suppress(ProcessLookupError):
        send(number, what)


def _group_ended(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _recorded(pid_file: Path) -> int | None:
    try:
        text = pid_file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return int(text) if text.strip().isdigit() else None


def _spawn(service: Service) -> int:
    """Its own session, its output in its log; not our child to wait for, so no Popen."""
    lock = os.open(service.pid_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock, True)
        service.address_file.write_text(service.address, encoding="utf-8")
        to_log = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        pid = os.posix_spawn(
            service.command[0],
            service.command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(service.log), to_log, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(pid).encode(), 0)
        return pid
    finally:
        os.close(lock)


def _refuse_foreign(service: Service) -> None:
    """Raise ServiceFailed when something that is not ours listens at the service's address."""
    if " " in service.address:
        return  # listens nowhere
    url = urlsplit(service.address)
    host, port = url.hostname or "127.0.0.1", url.port
    # a process just killed may close its port a moment after its lock
    if port is None or _within(PORT_FREED_S, lambda: not _listens(host, port)):
        return
    flag = "PREFECT_PORT" if service.name == "server" else "TARGET_PORT"
    raise ServiceFailed(
        f"port {port} is taken by {_who(service.address)}",
        fix=f"stop it, or choose another port: {flag}={port + 1}",
    )


def _who(address: str) -> str:
    root = "{0.scheme}://{0.netloc}".format(urlsplit(address))
    settings = _get(f"{root}/api/admin/settings")
    if settings is not None:
        return f"the Prefect server of {settings.get('home', 'another checkout')}"
    info = _get(f"{root}/server_info")
    if info is not None:
        return f"a server of {info.get('model_path', 'a model')}"
    return "another program"


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def _get(url: str) -> dict[str, Any] | None:
    """The JSON object at `url`; None when there is none."""
    try:
        with open_directly(url, 3) as answer:
            body = json.load(answer)
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def _last_line(log: Path) -> str:
    lines = [
        line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line
    ]
    return lines[-1].strip() if lines else "it said nothing"
