"""`make up`, `make down`: the Prefect server, the process that serves the flows, the embedded target.

A service holds an flock on its pid file through a descriptor it inherits, so a pid is believed
only while its lock is held: stale files, reused pids and another checkout's processes never
confuse us. Standard library alone, so that a warm `make up` takes no time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datagen.errors import DatagenError, ServiceFailed

START_S = 180.0
STOP_S = 35.0  # a flow has 30 s to flush
PROFILE_PORT = 30000  # where the smollm2 profile expects its server
SERVING = "serving datagen/collect"  # printed by flows/serve.py


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
        text = os.read(fd, 32).decode()
        return int(text) if text.strip().isdigit() else None
    else:
        return None
    finally:
        os.close(fd)


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


def stop(service: Service) -> int | None:
    """Stop `service`: TERM, then KILL after the grace period. Returns its pid if it ran."""
    pid = holder(service.pid_file)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while holder(service.pid_file) == pid:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.05)
    service.pid_file.unlink(missing_ok=True)
    service.address_file.unlink(missing_ok=True)
    return pid


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
    if url.port is None or not _listens(url.hostname or "127.0.0.1", url.port):
        return
    flag = "PREFECT_PORT" if service.name == "server" else "TARGET_PORT"
    raise ServiceFailed(
        f"port {url.port} is taken by {_who(service.address)}",
        fix=f"stop it, or choose another port: {flag}={url.port + 1}",
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
        with urllib.request.urlopen(url, timeout=3) as answer:
            body = json.load(answer)
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def _healthy(service: Service) -> bool:
    try:
        with urllib.request.urlopen(f"{service.address}/health", timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _says_serving(service: Service) -> bool:
    return SERVING in service.log.read_text(encoding="utf-8", errors="replace")


def _last_line(log: Path) -> str:
    lines = [
        line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line
    ]
    return lines[-1].strip() if lines else "it said nothing"


def all_services(home: Path, prefect_port: int, target_port: int) -> tuple[Service, ...]:
    """Server, flows and target, of the checkout whose PREFECT_HOME is `home`."""
    api = f"http://127.0.0.1:{prefect_port}/api"
    target = f"http://127.0.0.1:{target_port}"
    python, host = sys.executable, ("--host", "127.0.0.1")
    start_server = (python, "-m", "prefect", "server", "start", *host, "--port", str(prefect_port))
    serve_flows: tuple[str, ...] = (python, "-u", "-m", "flows.serve")
    if target_port != PROFILE_PORT:
        serve_flows = (*serve_flows, "--endpoints", target)
    serve_target = (python, "-m", "datagen.cli", "serve", *host, "--port", str(target_port))
    return (
        Service("server", home, start_server, api, _healthy),
        Service("flows", home, serve_flows, f"{api} with {target}", _says_serving),
        Service("target", home, serve_target, target, _healthy),
    )


def up(server: Service, flows: Service, target: Service | None) -> None:
    """Start what is not running, together where they do not need each other. Raises ServiceFailed."""
    for service in filter(None, (server, target)):
        if start(service):
            print(f"starting the {service.name} at {service.address}", flush=True)
    wait_ready(server)
    if _outlived(server, flows) and not _runs_in_progress(server):
        stop(flows)
    start(flows)
    wait_ready(flows)
    if target is not None:
        wait_ready(target)


def _outlived(server: Service, flows: Service) -> bool:
    """Whether the flows process is older than the server.

    Prefect's runner goes on when its server dies, but cancels no run ever after.
    """
    return holder(flows.pid_file) is not None and (
        flows.pid_file.stat().st_mtime < server.pid_file.stat().st_mtime
    )


def _runs_in_progress(server: Service) -> bool:
    states = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}}
    query = urllib.request.Request(
        f"{server.address}/flow_runs/count",
        data=json.dumps(states).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(query, timeout=10) as answer:
            return bool(json.load(answer) > 0)
    except OSError:
        return True  # a busy server cannot tell: leave everything as it is


def main() -> None:
    """Entry point of `python -m flows.services`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status"])
    parser.add_argument("--home", type=Path, default=Path(".prefect"))
    parser.add_argument("--prefect-port", type=int, default=4331)
    parser.add_argument("--target-port", type=int, default=30000)
    parser.add_argument("--no-target", action="store_true", help="the target runs elsewhere")
    args = parser.parse_args()
    home: Path = args.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    server, flows, target = all_services(home, args.prefect_port, args.target_port)
    with _alone(home / "services.lock"):
        if args.action == "up":
            up(server, flows, None if args.no_target else target)
            print(f"Prefect UI: {server.address.removesuffix('/api')}")
        elif args.action == "down":
            for service in (flows, target, server):
                if (pid := stop(service)) is not None:
                    print(f"stopped the {service.name} process ({pid})", flush=True)
        else:
            for service in (server, flows, target):
                pid = holder(service.pid_file)
                state = "down" if pid is None else f"pid {pid}"
                if pid is not None and not service.ready(service):
                    state += ", not ready"
                print(f"{service.name:<8}{state:<24}{service.address}")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two `make up` at once take turns."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        main()
    except DatagenError as e:
        sys.exit(f"datagen: error: {e}")
