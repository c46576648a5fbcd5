"""Hands small captures to processes that write them. Standard library alone.

Threads that write files take the interpreter's lock some five times a file, and each time the engine's
scheduler waits for it. At SmolLM2's width, 530 captures a second, that cost a quarter of the prefill
on an H200, while the writing itself would have fit ten times. So small captures are gathered for a moment
and copied, all of them in one call, into memory that this process shares with another one; a short message
in a pipe says what lies there, and the other process makes the files (see carried.py).

A process that has captures and answers nothing for HUNG_S is taken for dead, as one that ended: it is
killed, an error note is left for each capture that it had, whose client asks again, and what follows is
written without it.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import select
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from datagen.capture.carried import ANSWER, Job, message, parts_of, write_job
from datagen.capture.spool import leave_note, write_all

log = logging.getLogger(__name__)
GATHER_S = 0.05
PROCESSES = 2  # one writes and sums 0.9 GB/s
SLOTS = 3  # of a process: one is read, one waits, one is filled
MESSAGE_BYTES = 64 << 20  # of rows; a slot keeps the memory of the largest it had
HUNG_S = 20.0  # less than a client waits for its file
KILLED_S = 5.0


@dataclass(slots=True)
class _Process:
    child: subprocess.Popen[bytes]
    slots: list[int]
    """Descriptors of the memory that it shares."""
    free: list[int]
    """Which of them may be filled."""
    under_way: deque[tuple[str, int, int | None]]
    """Path and bytes of what it was sent and has not answered; of a message's last, the slot."""
    mark: object = None
    """How far it was when it was last looked at, at `moved_at`."""
    moved_at: float = 0.0
    fault: str = ""
    """Why it was killed."""


class Carrier:
    """Hands captures to its processes, a few times a second. One thread; `put` may be called by any."""

    def __init__(
        self, done: Callable[[int], None], processes: int = PROCESSES, *, hung_s: float = HUNG_S
    ) -> None:
        """`done` is told the bytes of rows that are published or have failed."""
        self._done, self._hung_s = done, hung_s
        self._jobs: deque[Job] = deque()
        self._idle, self._wake, self._closing = False, threading.Event(), False
        self._processes = [_started() for _ in range(processes)]
        self._turn, self._ear = itertools.cycle(range(processes)), itertools.cycle(range(processes))
        self._answers = select.poll()
        for process in self._processes:
            assert process.child.stdout is not None
            self._answers.register(process.child.stdout, select.POLLIN)
        self.alive = True
        """False once a process has died or hung: what is put then is written by the carrier's own thread."""
        self._thread = threading.Thread(target=self._run, name="spool-carrier", daemon=True)
        self._thread.start()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="spool-watch", daemon=True)
        self._watcher.start()

    def put(self, job: Job) -> None:
        """Queue a capture."""
        self._jobs.append(job)
        if self._idle:  # waking a thread costs the caller more than anything else here
            self._wake.set()

    def close(self) -> None:
        """Wait until everything is published, then end the processes."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        for process in self._processes:
            self._end(process)
        self._over.set()
        self._watcher.join()

    def _run(self) -> None:
        while True:
            if not self._jobs and not any(p.under_way for p in self._processes):
                self._idle = True
                if not self._jobs and not self._closing:
                    self._wake.wait()
                self._idle = False
                self._wake.clear()
                if self._closing and not self._jobs:
                    return
            time.sleep(GATHER_S)
            while self._jobs:
                self._send(self._gathered())
            if self.alive:  # one of them a time: each look costs a round of the interpreter's lock
                self._hear(self._processes[next(self._ear)])

    def _gathered(self) -> list[Job]:
        jobs: list[Job] = []
        size = 0
        while self._jobs and (not jobs or size + self._jobs[0].n_bytes <= MESSAGE_BYTES):
            jobs.append(self._jobs.popleft())
            size += jobs[-1].n_bytes
        return jobs

    def _send(self, jobs: list[Job]) -> None:
        process = self._ready()
        if process is not None and self._handed_over(process, jobs):
            return
        for job in jobs:
            write_job(job)
            self._done(job.n_bytes)

    def _ready(self) -> _Process | None:
        """The next process with a free slot, which is waited for; None when they are gone."""
        while self.alive:
            for _ in self._processes:
                process = self._processes[next(self._turn)]
                if process.free:
                    return process
            self._answers.poll()
            for process in self._processes:
                if self.alive:
                    self._hear(process)
        return None

    def _handed_over(self, process: _Process, jobs: list[Job]) -> bool:
        """Whether `process` was told, alive or not; False when no memory is left to share."""
        slot, last = process.free.pop(), len(jobs) - 1
        try:
            write_all(process.slots[slot], parts_of(jobs), 0)
        except OSError as e:
            self._give_up(f"no memory to share with it: {e}")
            return False
        process.under_way.extend(
            (job.path, job.n_bytes, slot if i == last else None) for i, job in enumerate(jobs)
        )
        assert process.child.stdin is not None
        try:
            write_all(process.child.stdin.fileno(), [message(jobs, slot)])
        except OSError as e:
            self._give_up(process.fault or repr(e))
        return True

    def _hear(self, process: _Process) -> None:
        assert process.child.stdout is not None
        try:
            heard = os.read(process.child.stdout.fileno(), ANSWER.size * 512)
        except BlockingIOError:
            return
        if not heard:
            ended = process.child.wait()
            self._give_up(process.fault or f"it ended with {ended}")
            return
        for (n_bytes,) in ANSWER.iter_unpack(heard):
            left = n_bytes
            while left > 0:
                _, size, slot = process.under_way.popleft()
                left -= size
                if slot is not None:
                    process.free.append(slot)
            self._done(n_bytes)

    def _give_up(self, why: str) -> None:
        """A process is gone: note what it may have had, and write the rest without it."""
        log.error("the process that writes small captures is gone: %s", why)
        self.alive = False
        for process in self._processes:
            self._end(process)  # a sound one publishes what it has
            for path, n_bytes, _ in process.under_way:
                if not os.path.exists(path):
                    leave_note(path, f"the process that writes small captures is gone: {why}")
                self._done(n_bytes)
            process.under_way.clear()

    def _end(self, process: _Process) -> None:
        """Let it finish what it has, and wait for its end; one that hangs is ended meanwhile.

        One that has finished and does not see the end of its pipe, which a fork of this process may hold
        open, is killed.
        """
        child = process.child
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        try:
            child.wait(2 * self._hung_s + KILLED_S)
        except subprocess.TimeoutExpired:
            child.kill()
            try:
                child.wait(KILLED_S)
            except subprocess.TimeoutExpired:  # it waits for a device: nobody can end it
                log.error("process %d does not end", child.pid)
        child.stdout.close()
        while process.slots:
            os.close(process.slots.pop())

    def _watch(self) -> None:
        """Kill a process that hangs: the carrier's thread, which may wait for its pipe, sees its end."""
        while not self._over.wait(self._hung_s / 8):
            for process in self._processes:
                now, mark = time.monotonic(), _mark(process)
                if mark != process.mark:
                    process.mark, process.moved_at = mark, now
                elif now - process.moved_at > self._hung_s and not process.fault:
                    process.fault = f"it has answered nothing for {self._hung_s:g} s"
                    process.child.kill()


def _mark(process: _Process) -> object:
    """What changes while a process does its work; never the same twice when it has none."""
    try:
        first = process.under_way[0]
    except IndexError:
        return object()
    return first, _filled_bytes(process.child.stdin), _filled_bytes(process.child.stdout)


def _filled_bytes(pipe: IO[bytes] | None) -> bytes:
    """How much of a pipe nobody has read yet; empty when it is closed."""
    try:
        return fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4)) if pipe else b""
    except (OSError, ValueError):
        return b""


def _started() -> _Process:
    slots = [os.memfd_create("datagen-capture") for _ in range(SLOTS)]
    child = subprocess.Popen(
        [sys.executable, "-m", "datagen.capture.carried", *map(str, slots)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=slots,
    )  # fmt: skip
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    return _Process(child, slots, list(range(SLOTS)), deque())
