"""A real SGLang on a GPU of this machine: the contract, captures among decodes, and the benchmark's check.

    python -m tests.sglang.gpu [arguments of pytest]     says why and ends with 0 where there is none

$DATAGEN_SGLANG_PYTHON names the interpreter in which SGLang is installed (else this one, or the first
`python3`); $DATAGEN_SGLANG_FLAGS are flags for every server, such as another attention backend.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from datagen.embedded.weights import ensure_checkpoint
from tests.sglang.environment import Unbuildable
from tests.sglang.server import ROOT, Installed

FLAGS = ("--dtype", "bfloat16", "--max-total-tokens", "65536", "--max-running-requests", "64")
TESTS = ("test_contract.py", "test_capture.py", "test_plugin_start.py")
PROBE = """
import importlib.metadata, torch
print(importlib.metadata.version("sglang"), torch.cuda.device_count())
"""


@functools.cache
def installed() -> Installed:
    """SGLang for servers on a GPU. Raises Unbuildable, saying what is missing."""
    named = os.environ.get("DATAGEN_SGLANG_PYTHON")
    candidates = [named] if named else [sys.executable, shutil.which("python3")]
    why = "there is no python3"
    for python in filter(None, candidates):
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            why = f"{python} has no SGLang ({last}): name another with DATAGEN_SGLANG_PYTHON"
            continue
        version, gpus = done.stdout.split()[-2:]
        if gpus != "0":
            more = shlex.split(os.environ.get("DATAGEN_SGLANG_FLAGS", ""))
            kept = {k: v for k, v in os.environ.items() if k.startswith("SGLANG_")}
            return Installed(Path(python), (*FLAGS, *more), kept)
        why = f"torch of {python} (SGLang {version}) sees no GPU"
    raise Unbuildable(why)


def main(arguments: list[str]) -> int:
    """Run the tests, and the check beside them on a server of its own; 0 when both pass."""
    try:
        found = installed()
    except Unbuildable as e:
        print(f"skipped, real SGLang on a GPU is not tested here: {e}")
        return 0
    tests = [str(ROOT / "tests" / "sglang" / name) for name in TESTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check = [
            str(found.python), str(ROOT / "benchmarks" / "sglang_check.py"), "--model",
            str(ensure_checkpoint()), "--out", name, "--", *found.flags,
        ]  # fmt: skip
        with open(folder / "check.log", "wb") as log, subprocess.Popen(
            check, stdout=log, stderr=log
        ) as checking:  # fmt: skip
            tested = subprocess.run(
                [sys.executable, "-m", "pytest", *(arguments or tests)],
                env=os.environ | {"DATAGEN_TEST_SGLANG": "gpu"}, check=False, cwd=ROOT,
            )  # fmt: skip
            checked = checking.wait()
        print((folder / "check.log").read_text(errors="replace"))
    return tested.returncode or checked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
