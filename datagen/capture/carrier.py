"""Writes small captures in processes of their own. Standard library alone.

Threads that write files take the interpreter's lock some five times a file, and each time the engine's
scheduler waits for it. At SmolLM2's width, 530 captures a second, that cost a quarter of the prefill
on an H200, while the writing itself would have fit ten times. So small captures are gathered for a moment
and leave in one write to a pipe; a process at its other end makes the files.

A message: two little-endian u32, the lengths of the head and of the body; the head, a JSON list with one
object a capture (see `_message`); the body, for each capture its rows and its ids. It is answered with the
bytes of rows that are published or have failed, a little-endian u64; while it takes long, in several.

A process that has captures and answers nothing for HUNG_S is taken for dead, as one that ended: it is
killed, an error note is left for each capture that it had, whose client asks again, and what follows is
written without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from datagen.capture.spool import leave_note, write_all, write_spool

log = logging.getLogger(__name__)
GATHER_S = 0.03
PROCESSES = 2  # one writes and sums 0.9 GB/s
PIPE_BYTES = 1 << 20
MESSAGE_BYTES = 64 << 20
HUNG_S = 20.0  # less than a client waits for its file
KILLED_S = 5.0
TELL_EVERY_S = 1.0
SIZES, ANSWER = struct.Struct("<II"), struct.Struct("<Q")


@dataclass(slots=True)
class Job:
    """One capture to be published at `path`; the rest is what `write_spool` takes."""

    path: str
    pieces: list[memoryview]
    n_tokens: int
    width: int
    dtype: str
    input_ids: bytes
    metadata: dict[str, str]
    n_bytes: int
    """Of rows; `done` is told them."""


def write_job(job: Job) -> None:
    """Publish `job` here and now; a failure is left as a note beside the path."""
    try:
        write_spool(
            job.path, rows=job.pieces, n_tokens=job.n_tokens, width=job.width, dtype=job.dtype,
            input_ids=job.input_ids, metadata=job.metadata,
        )  # fmt: skip
    except (OSError, ValueError) as e:
        log.error("cannot write capture %s: %s", job.path, e)
        leave_note(job.path, repr(e))


@dataclass(slots=True)
class _Process:
    child: subprocess.Popen[bytes]
    under_way: deque[tuple[str, int]]
    """Path and bytes of what it was sent and has not answered."""
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
        self._processes = [_Process(_started(), deque()) for _ in range(processes)]
        self._turn, self._ear = itertools.cycle(range(processes)), itertools.cycle(range(processes))
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
        process = self._processes[next(self._turn)]
        if self.alive:
            process.under_way.extend((job.path, job.n_bytes) for job in jobs)
            assert process.child.stdin is not None
            try:
                write_all(process.child.stdin.fileno(), _message(jobs))
            except OSError as e:
                self._give_up(process.fault or repr(e))
            return
        for job in jobs:
            write_job(job)
            self._done(job.n_bytes)

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
                left -= process.under_way.popleft()[1]
            self._done(n_bytes)

    def _give_up(self, why: str) -> None:
        """A process is gone: note what it may have had, and write the rest without it."""
        log.error("the process that writes small captures is gone: %s", why)
        self.alive = False
        for process in self._processes:
            self._end(process)  # a sound one publishes what it has
            for path, n_bytes in process.under_way:
                if not os.path.exists(path):
                    leave_note(path, f"the process that writes small captures is gone: {why}")
                self._done(n_bytes)
            process.under_way.clear()

    def _end(self, process: _Process) -> None:
        """Let it finish what it has, and wait for its end; one that hangs is ended meanwhile."""
        child = process.child
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        try:
            child.wait(2 * self._hung_s + KILLED_S)
        except subprocess.TimeoutExpired:  # it waits for a device: nobody can end it
            log.error("process %d does not end", child.pid)
        child.stdout.close()

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


def _started() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "datagen.capture.carrier"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(OSError):  # a smaller pipe is slower, no more
        fcntl.fcntl(child.stdin.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(child.stdout.fileno(), False)
    return child


def _message(jobs: Sequence[Job]) -> list[bytes | memoryview]:
    head = json.dumps(
        [
            [j.path, j.n_tokens, j.width, j.dtype, j.metadata, j.n_bytes, len(j.input_ids)]
            for j in jobs
        ]
    ).encode()
    body = sum(j.n_bytes + len(j.input_ids) for j in jobs)
    parts: list[bytes | memoryview] = [SIZES.pack(len(head), body), head]
    for job in jobs:
        parts += [*job.pieces, job.input_ids]
    return parts


# -- the process at the other end -----------------------------------------------------------------------


def _filled(fd: int, view: memoryview) -> bool:
    """Fill `view` from `fd`; False when it ends before."""
    at = 0
    while at < len(view):
        read = os.readv(fd, [view[at:]])
        if not read:
            return False
        at += read
    return True


def serve(source: int, answers: int) -> None:
    """Publish what arrives at `source` until it ends; a message that ends in its middle is dropped."""
    sizes, buffer = bytearray(SIZES.size), bytearray()
    while _filled(source, memoryview(sizes)):
        n_head, n_body = SIZES.unpack(sizes)
        head = bytearray(n_head)
        if len(buffer) < n_body:
            buffer = bytearray(n_body)
        body = memoryview(buffer)[:n_body]
        if not (_filled(source, memoryview(head)) and _filled(source, body)):
            return
        at = done = 0
        told_at = time.monotonic()
        for path, n_tokens, width, dtype, metadata, n_rows, n_ids in json.loads(head):
            rows, ids = body[at : at + n_rows], body[at + n_rows : at + n_rows + n_ids]
            write_job(Job(path, [rows], n_tokens, width, dtype, bytes(ids), metadata, n_rows))
            at, done = at + n_rows + n_ids, done + n_rows
            if time.monotonic() - told_at > TELL_EVERY_S:
                os.write(answers, ANSWER.pack(done))
                done, told_at = 0, time.monotonic()
        os.write(answers, ANSWER.pack(done))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's end is the end of the pipe
    logging.basicConfig(format="datagen capture: %(message)s")
    serve(0, 1)


if __name__ == "__main__":
    _main()
