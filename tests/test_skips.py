"""A skip must be seen, and in CI it must be allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPPING = "import pytest\n\ndef test_it():\n    pytest.skip('no room')\n"


def run_pytest(folder: Path, allowed: str, *, ci: bool) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "tests" / "allowed_skips.txt").write_text(allowed)
    (folder / "test_x.py").write_text(SKIPPING)
    env = {k: v for k, v in os.environ.items() if k != "CI"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "."],
        cwd=folder, env=env | ({"CI": "1"} if ci else {}), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_ci_fails_on_a_skip_that_is_not_listed(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "", ci=True)
    assert done.returncode == 1
    assert "NOT ALLOWED: test_x.py::test_it: no room" in done.stdout


@pytest.mark.parametrize("line", ["test_x.py::test_it | no room", "test_x.py* | no *"])
def test_ci_passes_on_a_skip_that_is_listed(tmp_path: Path, line: str) -> None:
    done = run_pytest(tmp_path, f"# why\n{line}\n", ci=True)
    assert done.returncode == 0
    assert "allowed: test_x.py::test_it: no room" in done.stdout


def test_ci_fails_on_a_listed_test_that_skips_for_another_reason(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, "test_x.py::test_it | no network", ci=True).returncode == 1


def test_outside_of_ci_a_skip_is_only_printed(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "", ci=False)
    assert done.returncode == 0
    assert "would fail in CI" in done.stdout
