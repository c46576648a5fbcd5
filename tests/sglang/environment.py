"""The environment of a real SGLang on a CPU: built once, kept in the user's cache.

    python -m tests.sglang.environment     builds it when it is absent, and prints its path

$DATAGEN_SGLANG_VERSION chooses the other end of the supported range, 0.5.17; $DATAGEN_SGLANG_VENV names
another place; $TORCH_ARGS are further arguments of the install of torch, for registries whose default is a
CUDA build. About 2.7 GB and 2 to 5 minutes each.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from datagen.embedded.weights import cache_directory
from tests.sglang.server import Installed

NEWEST, OLDEST = "0.5.23", "0.5.17"
VERSION = os.environ.get("DATAGEN_SGLANG_VERSION") or NEWEST
PYTHON = (3, 11)  # of the pins
STAMP = ".complete"
FLAGS = (
    "--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--mem-fraction-static", "0.3",
    "--max-total-tokens", "8192", "--max-running-requests", "8",
    # else decodes wait until no prefill does
    *(("--prefill-decode-interval", "1") if VERSION == NEWEST else ()),
)  # fmt: skip
CUDA_OF_TORCH = """
import runpy
from importlib.util import find_spec
print(runpy.run_path(find_spec("torch").submodule_search_locations[0] + "/version.py")["cuda"])
"""  # torch itself cannot be imported before what it needs is there
SGL_KERNEL = '''"""Stub: sgl_kernel has no CPU wheel; any name imports, and raises when called."""
__version__ = "0.4.10"


def _missing(name):
    def call(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel stub: {name} called")
    return call


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
'''


class Unbuildable(Exception):
    """The environment cannot be had here, and why."""


def venv_path() -> Path:
    """Where the environment is, or would be."""
    explicit = os.environ.get("DATAGEN_SGLANG_VENV")
    return Path(explicit) if explicit else cache_directory() / f"sglang-cpu-{VERSION}"


def find() -> Path | None:
    """The environment's directory, when it is complete."""
    venv = venv_path()
    return venv if (venv / STAMP).exists() else None


def installed() -> Installed:
    """The environment for servers on this CPU. Raises Unbuildable when it has not been built."""
    venv = find()
    if venv is None:
        raise Unbuildable(f"no SGLang environment at {venv_path()}: run `make test-sglang`")
    return Installed(venv / "bin" / "python", FLAGS, {"SGLANG_USE_CPU_ENGINE": "1"})


def pins(version: str) -> list[str]:
    """What the environment holds; the oldest release has some packages of its time. Raises Unbuildable."""
    if version not in (NEWEST, OLDEST):
        raise Unbuildable(f"SGLang {version} has no pins here: {NEWEST} and {OLDEST} have")
    names = ["requirements-cpu.txt"] + (
        ["requirements-cpu-0.5.17.txt"] if version == OLDEST else []
    )
    lines = [
        line
        for name in names
        for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    return list({line.split("==")[0]: line for line in lines}.values())


def ensure() -> Path:
    """The environment, built when absent. Raises Unbuildable."""
    venv = venv_path()
    if (venv / STAMP).exists():
        return venv
    if sys.version_info[:2] != PYTHON:
        raise Unbuildable(f"the pins are for Python 3.11, this is {sys.version.split()[0]}")
    wanted = pins(VERSION)
    torch = [p for p in wanted if p.startswith("torch==")]
    _run(sys.executable, "-m", "venv", "--clear", str(venv))
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--quiet", "--no-deps", "--only-binary=:all:"]
    _run(*pip, *shlex.split(os.environ.get("TORCH_ARGS", "")), *torch)
    cuda = _run(str(venv / "bin" / "python"), "-c", CUDA_OF_TORCH)
    if cuda.strip() != "None":
        raise Unbuildable(
            "the registry's torch is a CUDA build: set TORCH_ARGS to an index of CPU builds"
        )
    _run(*pip, *(p for p in wanted if p not in torch))
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(_run(str(venv / "bin" / "python"), "-c", purelib).strip())
    # torchvision is a CUDA build, whose operators do not load beside a CPU torch
    fakes = packages / "torchvision" / "_meta_registrations.py"
    patched = re.sub(
        r"(?m)^@torch\.library\.register_fake\(.*", "@(lambda f: f)", fakes.read_text("utf-8")
    )
    fakes.write_text(patched, encoding="utf-8")
    (packages / "sgl_kernel").mkdir(exist_ok=True)
    (packages / "sgl_kernel" / "__init__.py").write_text(SGL_KERNEL, encoding="utf-8")
    (venv / STAMP).touch()
    return venv


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Unbuildable(f"{Path(command[0]).name} {' '.join(command[1:4])} failed: {last}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(ensure())
    except Unbuildable as e:
        print(f"no SGLang on this machine: {e}", file=sys.stderr)
        sys.exit(3)
