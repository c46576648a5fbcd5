"""Decoding processes end with their trainer, and only by it; what they cannot hand over is one line."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datagen.drafter.dataset import ManifestSource
from datagen.drafter.loader import Loader
from datagen.drafter.packing import usable
from datagen.errors import TrainingFailed
from tests.drafter.run import tiny_target, write_run

ROOT = Path(__file__).resolve().parents[2]
TRAINER = """
import multiprocessing, sys, time
from pathlib import Path
from tests.drafter.test_decoders import loader

if __name__ == "__main__":
    stream = loader(Path(sys.argv[1]), 1).stream([(0,)] * 9)
    next(stream)
    print(*(p.pid for p in multiprocessing.active_children()), flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return write_run(folder / "run", tiny_target(folder), train=4, heldout=1)


def loader(manifest: Path, processes: int = 2) -> Loader:
    source = ManifestSource(manifest)
    data = usable(source.index("train", 0), 1 << 20)
    return Loader([source], data, 3, threads=processes, pad=(512, 128), processes=True)


def alive(pid: int) -> bool:
    """A zombie is not: whoever inherits it may take its time to read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(claim: Callable[[], bool], within_s: float = 60) -> bool:
    deadline = time.monotonic() + within_s
    while not (held := claim()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def test_a_killed_trainer_leaves_no_process(tmp_path: Path, manifest: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(manifest)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert trainer.stdout is not None
    pids = [int(p) for p in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.wait(60)
    trainer.stdout.close()
    try:
        assert len(pids) == 1
        assert soon(lambda: not any(alive(p) for p in pids)), "they outlive their trainer"
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_signals_to_the_whole_job_leave_the_batches_coming_until_one_process_is_killed(
    manifest: Path,
) -> None:
    enough = threading.Event()

    def disturb() -> None:
        """By another process, as a terminal or a scheduler is one: from birth on."""
        while not enough.wait(0.005):
            pids = [str(p.pid) for p in multiprocessing.active_children()]
            for name in ("-TERM", "-INT"):
                subprocess.run(["kill", name, *pids], check=False, stderr=subprocess.DEVNULL)

    stream = loader(manifest).stream([(n % 4,) for n in range(100_000)])
    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        names = [next(stream).sample_ids for _ in range(8)]
    finally:
        enough.set()
        disturber.join()
    assert names[:4] == names[4:]
    one, other = multiprocessing.active_children()
    ahead = stream.gi_frame.f_locals["waiting"]  # type: ignore[attr-defined]
    assert soon(lambda: all(batch.done() for batch in ahead)), "it dies with no lock of a queue"
    one.kill()
    with pytest.raises(TrainingFailed, match="ended by itself"):
        for _ in stream:
            pass
    assert soon(lambda: not alive(other.pid or 0))


def test_too_little_shared_memory_is_one_line_with_what_to_do(manifest: Path) -> None:
    """A file-size limit stands for a small /dev/shm: both refuse the shared file its pages."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    stream = loader(manifest, 1).stream([(0,)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(TrainingFailed, match="shared memory") as caught:
            next(stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    text = str(caught.value)
    assert "\n" not in text
    assert "/dev/shm" in text
    assert "--no-graphs" in text


def test_processes_that_cannot_be_started_are_one_line(manifest: Path) -> None:
    stream = loader(manifest, 1).stream([(0,)])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(TrainingFailed, match=r"cannot be started: .*Too many open files"):
            next(stream)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
