"""A private Prefect server and flow process on free ports, started exactly as `make up` does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from datagen.errors import CorruptFile
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.plan import Plan
from flows.processes import Service, holder, stop
from flows.services import PROFILE_PORT, all_services, up
from tests.collect.harness import Bench
from tests.tiny import TargetProcess, free_port, serving, write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 30
SLOW = {"max_new_tokens": 250, "concurrency": 4}  # slow enough to be met in the middle
T = TypeVar("T")


def eventually(look: Callable[[], T], *, within_s: float = 180) -> T:
    """What `look` returns once it is true; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"still {seen!r} after {within_s} s"
        time.sleep(0.1)
    return seen


@dataclass(frozen=True, slots=True)
class Prefect:
    """The two services, and what a user would type and see."""

    server: Service
    flows: Service
    folder: Path

    def up(self) -> None:
        up(self.server, self.flows, None)

    def pid(self, service: Service) -> int:
        pid = holder(service.pid_file)
        assert pid is not None, service.log.read_text()
        return pid

    def command(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def deployment_run(self, *flags: str, **parameters: Any) -> subprocess.CompletedProcess[str]:
        """`prefect deployment run datagen/collect`."""
        given = [f"-p{name}={json.dumps(value)}" for name, value in parameters.items()]
        return self.command("deployment", "run", "datagen/collect", *flags, *given)

    def start(self, **parameters: Any) -> None:
        """The same through the API, without the seconds that a command line needs to start."""
        deployment = self.get("/deployments/name/datagen/collect")
        self.post(
            f"/deployments/{deployment['id']}/create_flow_run",
            {"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )

    def collect(self, **parameters: Any) -> dict[str, Any]:
        """Start a flow run and wait for its end; returns it."""
        self.start(**parameters)
        run = Path(parameters["run"])
        final = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        eventually(lambda: self.latest(run)["state_type"] in final, within_s=240)
        return self.latest(run)

    def latest(self, run: Path) -> dict[str, Any]:
        """The latest flow run of a run directory."""
        return self.flow_runs(run)[0]

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.server.address}{path}", timeout=30).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer; asked again while SQLite is locked, as Prefect's own client does."""

        def answered() -> httpx.Response | None:
            answer = httpx.post(f"{self.server.address}{path}", json=body, timeout=30)
            return None if answer.status_code == 503 else answer

        return eventually(answered).raise_for_status().json()

    def find(self, what: str, **filters: Any) -> list[dict[str, Any]]:
        """The objects of a kind, e.g. `task_runs`, that pass the API's filters."""
        found: list[dict[str, Any]] = self.post(f"/{what}/filter", filters)
        return found

    def cancel(self, flow_run: dict[str, Any]) -> None:
        """What the UI's Cancel button sends."""
        self.post(f"/flow_runs/{flow_run['id']}/set_state", {"state": {"type": "CANCELLING"}})

    def flow_runs(self, run: Path) -> list[dict[str, Any]]:
        """Flow runs of a run directory, the latest first."""
        runs = self.find("flow_runs", sort="EXPECTED_START_TIME_DESC")
        return [r for r in runs if r["parameters"].get("run") == str(run)]

    def task_runs(self, flow_run: dict[str, Any]) -> list[dict[str, Any]]:
        return self.find("task_runs", flow_runs={"id": {"any_": [flow_run["id"]]}})

    def artifacts(self, flow_run: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The artifacts of a flow run by key."""
        found = self.find("artifacts", flow_runs={"id": {"any_": [flow_run["id"]]}})
        return {a["key"]: a for a in found}


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    folder = tmp_path_factory.mktemp("prefect")
    home, port = folder / "home", free_port()
    home.mkdir()
    server, flows, _ = all_services(home, port, PROFILE_PORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where prefect.toml is
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_API_URL", server.address)
        patch.setenv("COLUMNS", "400")
        session = Prefect(server, flows, folder)
        session.up()
        try:
            yield session
        finally:
            stop(flows)
            stop(server)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    folder = tmp_path_factory.mktemp("flow-target")
    with serving(str(write_tiny_checkpoint(folder / "tiny-llama")), folder) as process:
        yield process


@pytest.fixture(scope="session")
def bench(target: TargetProcess, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("flows"), target.url, prompts=PROMPTS)


def settings(bench: Bench, run: Path, **more: Any) -> dict[str, Any]:
    """The flow parameters of a run over the tiny target."""
    return {
        "run": str(run),
        "mix": str(bench.mix),
        "target": str(bench.profile),
        "tokenizer": str(bench.checkpoint),
        "partition_prompts": 5,
        "limit": 0,
        **more,
    }


def manifest_of(run: Path) -> Manifest | None:
    """The manifest, once it is written."""
    try:
        return Manifest.load(run / "manifest.json")
    except CorruptFile:
        return None


def collected(run: Path) -> set[tuple[int, str, int, int]]:
    """(partition, prompt id, turn, time in ms) of every sample with states, by the journals."""
    layout = RunLayout(run)
    return {
        (index, bytes(r["prompt_id"]).hex(), int(r["turn"]), int(r["time_ms"]))
        for index in range(Plan.open(layout.plan).n_partitions)
        for r in read_journal(layout.partition(index).journal)
        if r["kind"] == Kind.STATES
    }
