"""The collector at its limits: memory that does not grow with the plan, and a disk without room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from datagen.store.run_status import run_status
from tests.collect.harness import CLI, Bench, environment
from tests.tiny import free_port, write_tiny_mix

MIB = 1 << 20


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("limits")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.scripted_target", str(port), str(folder / "spool")],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"serving\n"
        yield Bench.make(folder, f"http://127.0.0.1:{port}", prompts=10)
        server.terminate()
        server.wait(10)


def peak_memory(bench: Bench, prompts: int) -> int:
    """Peak resident bytes of a whole collect of `prompts` prompts."""
    folder = bench.folder / f"mix-{prompts}"
    folder.mkdir()
    mix = write_tiny_mix(folder, prompts)
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            bench.command(f"memory-{prompts}", "--mix", str(mix), "--partition-prompts", "50"),
            stdout=log, stderr=log, env=environment(bench.folder),
        )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (folder / "log").read_text()
    return usage.ru_maxrss * 1024


def test_memory_does_not_grow_with_the_number_of_prompts(bench: Bench) -> None:
    few, many = peak_memory(bench, 200), peak_memory(bench, 2000)
    print(f"peak resident: {few / MIB:.0f} MiB at 200 prompts, {many / MIB:.0f} MiB at 2,000")
    assert many - few < 25 * MIB


def test_a_full_disk_stops_the_run_and_loses_nothing(bench: Bench) -> None:
    small = bench.folder / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.strip()}")
    try:
        done = bench.collect("small/run")
        assert done.returncode == 1, done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("datagen: error")]
        assert len(lines) == 1, done.stderr
        assert "no space left" in lines[0].lower()
        assert str(small) in lines[0]
        kept = run_status(small / "run").collected
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        again = bench.collect("small/run")
        assert again.returncode == 0, again.stderr
        assert run_status(small / "run").collected > kept
        assert subprocess.run([*CLI, "verify", str(small / "run")], check=False).returncode == 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
