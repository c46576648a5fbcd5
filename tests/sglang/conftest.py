"""Two servers behind one API: the embedded target always, a real SGLang where its environment is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from datagen.embedded.weights import ensure_checkpoint
from datagen.target.profile import Profile, load_profile
from tests.sglang import environment, gpu
from tests.sglang.server import Installed, SGLangServer, install_plugin
from tests.tiny import serving

CHUNK = 64
CAPTURE_FLAGS = ("--enable-return-hidden-states", "--chunked-prefill-size", str(CHUNK))
ON = os.environ.get("DATAGEN_TEST_SGLANG", "")
"""Where SGLang itself is tested: `gpu`, `1` for the CPU, or nowhere."""


@dataclass(frozen=True)
class Target:
    """A running server of SmolLM2 that captures into `spool`."""

    kind: str
    url: str
    spool: Path
    pid: int = 0

    @property
    def is_real(self) -> bool:
        """True for SGLang itself."""
        return self.kind == "sglang"


@dataclass(frozen=True)
class RealEngine:
    """What starting a real server needs: its environment, our plugin installed, a place for logs."""

    installed: Installed
    site: Path
    folder: Path

    def server(self, name: str, *flags: str, **environment: str) -> SGLangServer:
        """A server that captures into <folder>/<name>/spool; not started yet."""
        folder = self.folder / name
        folder.mkdir()
        defaults = {
            "DATAGEN_CAPTURE_DIR": str(folder / "spool"), "DATAGEN_CAPTURE_BOUNDARIES": "2,15,27"
        }  # fmt: skip
        model = ensure_checkpoint()
        return SGLangServer(
            self.installed, self.site, model, folder, *flags, **(defaults | environment)
        )


@pytest.fixture(scope="session")
def real_engine() -> Iterator[RealEngine]:
    if not ON:
        pytest.skip("real SGLang is tested by `make test-sglang`")
    try:
        installed = gpu.installed() if ON == "gpu" else environment.installed()
    except environment.Unbuildable as e:
        pytest.skip(str(e))
    with tempfile.TemporaryDirectory(prefix="datagen-sglang-") as name:
        folder = Path(name)
        yield RealEngine(installed, install_plugin(installed.python, folder), folder)


@pytest.fixture(scope="session")
def sglang_target(real_engine: RealEngine) -> Iterator[Target]:
    server = real_engine.server("shared", *CAPTURE_FLAGS)
    try:
        server.start()
        yield Target("sglang", server.url, server.log.parent / "spool", server.pid)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def embedded_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("embedded")
    with serving("smollm2", folder, dtype="bfloat16") as process:
        yield Target("embedded", process.url, folder / "spool")


@pytest.fixture(params=["sglang"] if ON == "gpu" else ["embedded", "sglang"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(f"{request.param}_target")
    return found


@pytest.fixture(scope="session")
def profile() -> Profile:
    return load_profile("smollm2")
