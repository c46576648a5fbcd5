"""A real SGLang server, with our plugin installed in front of its environment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.tiny import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 420.0


@dataclass(frozen=True)
class Installed:
    """An SGLang: its interpreter, and what each of its servers needs on its device."""

    python: Path
    flags: tuple[str, ...]
    environment: Mapping[str, str]


def install_plugin(python: Path, folder: Path) -> Path:
    """`pip install --no-deps` of this checkout into a folder of its own; returns that folder."""
    source, site = folder / "source", folder / "site"
    for name in ("datagen", "flows"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [
            str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
            "--no-deps", "--target", str(site), str(source),
        ],
        check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    return site


def python_path(site: Path) -> str:
    """`site` in front of what the caller's interpreter is given."""
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


class SGLangServer:
    """Start, stop and kill; `flags` and `environment` come on top of what the device needs."""

    def __init__(
        self,
        installed: Installed,
        site: Path,
        model: Path,
        folder: Path,
        *flags: str,
        **environment: str,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "sglang.log"
        self._command = [
            str(installed.python), "-m", "sglang.launch_server", "--model-path", str(model),
            "--host", "127.0.0.1", "--port", str(self.port), *installed.flags, *flags,
        ]  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DATAGEN_", "SGLANG_"))}
        self._environment = kept | {
            "SGLANG_PLUGINS": "datagen_capture",
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "SPT_NOENV": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": python_path(site), **installed.environment, **environment,
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start, and wait until it answers. Raises RuntimeError with the end of its log."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True, cwd=self.log.parent,
            )  # fmt: skip
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError with the end of its log."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("SGLang did not come up:\n" + self.tail())
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    @property
    def pid(self) -> int:
        """Of its first process."""
        assert self._process is not None
        return self._process.pid

    def exit_code(self, patience_s: float) -> int:
        """Wait for the server to end by itself."""
        assert self._process is not None
        return self._process.wait(patience_s)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and all its processes."""
        if self._process is None:
            return
        for wanted in (number, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, wanted)
                self._process.wait(15)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.wait(15)

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(line[:300] for line in text.splitlines() if line.strip())[-300 * lines :]
