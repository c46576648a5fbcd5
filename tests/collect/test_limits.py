"""The collector at its limits: memory that does not grow with the plan, and a disk without room."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datagen.config import collect_config
from datagen.fanout.window import window_limit
from datagen.store.run_status import run_status
from tests.collect.harness import CLI, Bench, environment
from tests.tiny import free_port, write_tiny_mix

MIB = 1 << 20
RANDOM_STATES = ("--accept-risk", "boundaries")  # the scripted target draws them


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
        server.wait(60)


def resident_while_collecting(bench: Bench, prompts: int) -> list[int]:
    """Resident anonymous bytes, sampled from the first sealed partition to the end of the run."""
    folder = bench.folder / f"mix-{prompts}"
    folder.mkdir()
    root = bench.folder / f"memory-{prompts}"
    mix = write_tiny_mix(folder, prompts)
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            bench.command(
                root.name, "--mix", str(mix), "--partition-prompts", "50", *RANDOM_STATES
            ),
            stdout=log, stderr=log, env=environment(bench.folder),
        )  # fmt: skip
    samples: list[int] = []
    while process.poll() is None:
        if next(root.glob("partitions/*/partition.json"), None) is not None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            found = re.search(r"RssAnon:\s+(\d+) kB", status)  # gone once the process ends
            if found:
                samples.append(int(found[1]) * 1024)
        time.sleep(0.05)
    assert process.returncode == 0, (folder / "log").read_text()
    return samples


@pytest.mark.parametrize("prompts", [800, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_number_of_prompts(bench: Bench, prompts: int) -> None:
    few, many = resident_while_collecting(bench, 200), resident_while_collecting(bench, prompts)
    early = max(many[: len(many) // 4])
    print(
        f"resident: {max(few) / MIB:.0f} MiB at 200 prompts, {max(many) / MIB:.0f} MiB at {prompts}; "
        f"grown by {(max(many) - early) / MIB:.0f} MiB over the last three quarters of these"
    )
    assert max(many) - early < 12 * MIB, "the rows themselves leave nothing behind"
    # Allocators differ by some MiB from run to run; the index takes about 12 kB a prompt.
    assert max(many) - max(few) < 20 * MIB + (prompts - 200) * 22_000


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
        warned = bench.collect("small/run", *RANDOM_STATES)
        assert warned.returncode == 1, warned.stderr
        assert "[disk]" in warned.stderr
        assert "make room" in warned.stderr
        risks = (*RANDOM_STATES, "--accept-risk", "disk")
        done = bench.collect("small/run", *risks)
        assert done.returncode == 1, done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("datagen: error")]
        assert len(lines) == 1, done.stderr
        assert "no space left" in lines[0].lower()
        assert str(small) in lines[0]
        kept = run_status(small / "run").collected
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        again = bench.collect("small/run", *risks)
        assert again.returncode == 0, again.stderr
        assert run_status(small / "run").collected > kept
        assert subprocess.run([*CLI, "verify", str(small / "run")], check=False).returncode == 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_number_of_rows_is_taken_at_its_word_even_beyond_a_servers_graphs() -> None:
    kept = collect_config().dispatch.window
    told = collect_config(max_concurrency=300).dispatch.window
    assert window_limit(kept, max_running=1000, graph_batch=160) == 160
    assert window_limit(told, max_running=1000, graph_batch=160) == 300
