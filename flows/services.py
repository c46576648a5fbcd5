"""`make up`, `make down`: the Prefect server, the process that serves the flows, the embedded target.

Standard library alone, so that a warm `make up` takes no time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datagen.errors import DatagenError, ServiceFailed
from datagen.target.direct import open_directly
from flows.processes import Service, ensure, holder, is_healthy, orphans_live, start, stop

PROFILE_PORT = 30000  # where the smollm2 profile expects its server
SERVING = "serving datagen/collect"  # printed by flows/serve.py


def _says_serving(service: Service) -> bool:
    return SERVING in service.log.read_text(encoding="utf-8", errors="replace")


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
        Service("server", home, start_server, api, is_healthy),
        Service("flows", home, serve_flows, f"{api} with {target}", _says_serving),
        Service("target", home, serve_target, target, is_healthy),
    )


def up(server: Service, flows: Service, target: Service | None) -> None:
    """Start what is not running, together where they do not need each other. Raises ServiceFailed."""
    for service in filter(None, (server, target)):
        if start(service):
            print(f"starting the {service.name} at {service.address}", flush=True)
    ensure(server)
    if holder(flows.pid_file) is None:
        if not orphans_live(flows):
            _crash_lost_runs(server)
    elif _outlived(server, flows) and not _unfinished_runs(server):
        stop(flows)
    ensure(flows)
    if target is not None:
        ensure(target)


def _outlived(server: Service, flows: Service) -> bool:
    """Whether the flows process is older than the server.

    Prefect's runner goes on when its server dies, but cancels no run ever after.
    """
    return flows.pid_file.stat().st_mtime < server.pid_file.stat().st_mtime


def _crash_lost_runs(server: Service) -> None:
    """Mark the runs crashed whose process died with the flows process.

    Nobody else reports them for two minutes, and one of them holds the deployment's only slot.
    """
    for run in _unfinished_runs(server):
        message = "its process died: run it again to go on"
        state = {"type": "CRASHED", "name": "Crashed", "message": message}
        _post(server, f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
        print(f"flow run {run['name']} died with its process: marked crashed", flush=True)


def _unfinished_runs(server: Service) -> list[dict[str, Any]]:
    """Runs in progress that the flows process started; those of a worker have a work pool."""
    unfinished = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    found = _post(server, "/flow_runs/filter", {"flow_runs": unfinished})
    return [run for run in found if run["deployment_id"] and run["work_pool_name"] is None]


def _post(server: Service, path: str, body: dict[str, Any]) -> Any:
    """The answer of Prefect's API, asked again while its database is locked."""
    url, data = f"{server.address}{path}", json.dumps(body).encode()
    for wait_s in (0.5, 1, 2, 4, 8):
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with open_directly(request, 30) as answer:
                return json.load(answer)
        except OSError:
            time.sleep(wait_s)
    raise ServiceFailed(
        "the Prefect server does not answer", where=url, fix="`make down`, then `make up`"
    )


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
