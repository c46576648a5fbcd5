"""Processes that look at spool files and encode them, so that this one only asks, judges and writes.

Each has a socket, over which one job at a time goes, and memory that both sides map, in blocks: what it
encoded is written to the shard straight from there. A block is lent out with what lies in it and comes
back when nobody refers to that any more: once it is written, while it is synced. What waits is bounded by
the spool's budget, what is encoded and not yet written by the blocks. A process that dies is replaced and
its job done again, once. They end when their socket does: with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datagen.capture.spool import SpoolError
from datagen.collect import encode_worker
from datagen.collect.encode_worker import MESSAGE_BYTES
from datagen.collect.encoding import EncodePool
from datagen.errors import EncodingFailed
from datagen.store.codecs import Encoded
from datagen.store.guards import Refused, Sound
from datagen.store.partition import PartitionStore
from datagen.store.states import StatesSpec
from datagen.target.states import Captured

BLOCKS = 3  # of a process: one is filled while others are written
ATTEMPTS = 2
PATIENCE_S, LOOK_PATIENCE_S = (
    300.0,
    25.0,
)  # 128K tokens of Kimi's take 10 and 5 s; a row's deadline is longer
FEWER = "lower --encode-processes and --spool-mib; everything collected is on disk"
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MIMALLOC_PURGE_DELAY": "-1",
}  # fmt: skip
"""Memory given back is cleared page by page when it is asked for again, a third of the time of encoding."""


@dataclass(eq=False, slots=True)
class _Job:
    request: dict[str, Any]
    done: asyncio.Future[Any]
    params: bytes | None = None
    """Of a job that encodes: what with."""
    lost: int = 0


@dataclass(eq=False, slots=True)
class _Worker:
    child: subprocess.Popen[bytes]
    channel: socket.socket
    memory: list[int]
    """A descriptor a block."""
    maps: list[mmap.mmap | None]
    free: set[int]
    job: _Job | None = None
    alarm: asyncio.TimerHandle | None = None
    ready: bool = False


class EncodeProcesses:
    """`count` processes for captures of `spec`. Made, used and closed within one event loop.

    From the first samples of a run the codec learns on a thread here.
    """

    sums = True

    def __init__(self, spec: StatesSpec, count: int) -> None:
        self._spec, self._loop = spec, asyncio.get_running_loop()
        self._threads = EncodePool(1)
        self._looks: deque[_Job] = deque()
        self._encodes: deque[_Job] = deque()
        self._failed: EncodingFailed | None = None
        self._stillborn = 0
        self._workers: set[_Worker] = set()
        try:
            for _ in range(count):
                self._workers.add(self._started())
        except OSError as e:
            self.close()
            raise EncodingFailed(f"no process can be started that encodes: {e}", fix=FEWER) from e

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [w.child.pid for w in self._workers]

    async def examine(self, captured: Captured, n_tokens: int, spec: StatesSpec) -> Sound | Refused:  # noqa: ARG002
        """Checksum and every value. Goes before what is to be encoded: a server's slot waits for it.

        `spec`: that of these processes. Raises SpoolError, EncodingFailed.
        """
        request = {"path": str(captured.path), "n_tokens": n_tokens}
        found = await self._run(self._looks, _Job(request, self._loop.create_future()))
        if "sound" in found:
            return Sound(tuple(found["sound"]))
        if "refused" in found:
            return Refused(*found["refused"])
        raise SpoolError(found.get("torn") or found["gone"])

    async def encode(self, store: PartitionStore, captured: Captured) -> Encoded:
        """The rows as `store` keeps them; waits for its turn. Raises EncodingFailed."""
        params = store.encode.settled
        if params is None:
            params = await self._threads.run(store.encode.learn, captured.rows)
        request = {"path": str(captured.path), "params": base64.b64encode(params).decode()}
        found = await self._run(self._encodes, _Job(request, self._loop.create_future(), params))
        if isinstance(found, Encoded):
            return found
        return await self._threads.encode(store, captured)  # its file is gone, its rows are not

    def close(self) -> None:
        """Drop what waits, and end the processes: what they work at is wanted no more."""
        for worker in self._workers:
            self._let_go(worker)
            worker.child.kill()
        for worker in self._workers:
            worker.child.wait()
        at_work = [w.job for w in self._workers if w.job is not None]
        for job in (*self._looks, *self._encodes, *at_work):
            job.done.cancel()
        for left in (self._workers, self._looks, self._encodes):
            left.clear()
        self._threads.close()

    # -- jobs ----------------------------------------------------------------------------------

    async def _run(self, queue: deque[_Job], job: _Job) -> Any:
        if self._failed is not None:
            raise self._failed
        queue.append(job)
        self._match()
        return await job.done

    def _match(self) -> None:
        """Give jobs to whoever is free."""
        for worker in [w for w in self._workers if w.ready and w.job is None]:
            job = _wanted(self._looks)
            if job is None and worker.free:
                job = _wanted(self._encodes)
                if job is not None:
                    job.request["block"] = min(worker.free)
                    worker.free.remove(job.request["block"])
            if job is not None:
                self._give(worker, job)

    def _give(self, worker: _Worker, job: _Job) -> None:
        worker.job = job
        job.request["idle"] = [*worker.free]
        patience_s = LOOK_PATIENCE_S if job.params is None else PATIENCE_S
        worker.alarm = self._loop.call_later(patience_s, worker.child.kill)
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # its end tells that it died
            worker.channel.send(json.dumps(job.request).encode())

    def _heard(self, worker: _Worker) -> None:
        try:
            message = worker.channel.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lost(worker)
            return
        said, job, worker.job = json.loads(message), worker.job, None
        worker.ready, self._stillborn = True, 0
        if job is not None:
            assert worker.alarm is not None
            worker.alarm.cancel()
            self._told(worker, job, said)
        self._match()

    def _told(self, worker: _Worker, job: _Job, said: dict[str, Any]) -> None:
        block = job.request.get("block")
        if "exp" in said and not job.done.done():
            assert block is not None
            assert job.params is not None
            try:
                job.done.set_result(self._lend(worker, block, said, job.params))
            except OSError as e:  # of descriptors or of address space
                worker.free.add(block)
                why = f"what was encoded cannot be mapped: {e}"
                job.done.set_exception(EncodingFailed(why, where=job.request["path"], fix=FEWER))
            return
        if block is not None:
            worker.free.add(block)
        if job.done.done():  # nobody waits for it any more
            return
        if "failed" in said:
            job.done.set_exception(
                EncodingFailed(
                    f"a capture cannot be looked at or encoded: {said['failed']}",
                    where=job.request["path"],
                )
            )
        else:
            job.done.set_result(said)

    def _lend(self, worker: _Worker, block: int, said: dict[str, Any], params: bytes) -> Encoded:
        """What lies in `block`, which comes back when it is not referred to any more."""
        size = sum(said["exp"]) + said["sm"]
        mapped = worker.maps[block]
        if mapped is None or len(mapped) < size:
            mapped = worker.maps[block] = mmap.mmap(
                worker.memory[block], size, access=mmap.ACCESS_READ
            )
        whole = np.frombuffer(mapped, dtype=np.uint8, count=size)
        weakref.finalize(whole, self._given_back, worker, block).atexit = False
        view, frames, at = whole.data, [], 0
        for length in said["exp"]:
            frames.append(view[at : at + length])
            at += length
        return Encoded(frames, view[at:], params, tuple(said["shape"]))

    def _given_back(self, worker: _Worker, block: int) -> None:
        """On whatever thread was the last to refer to it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._free, worker, block)

    def _free(self, worker: _Worker, block: int) -> None:
        worker.free.add(block)
        if worker in self._workers:
            self._match()

    # -- processes -----------------------------------------------------------------------------

    def _started(self) -> _Worker:
        """Raises OSError, and leaves nothing then."""
        with ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            memory: list[int] = []
            for _ in range(BLOCKS):
                memory.append(os.memfd_create("datagen-encoded"))
                stack.callback(os.close, memory[-1])
            with theirs:
                child = subprocess.Popen(
                    [
                        sys.executable, "-P", "-m", encode_worker.__name__, str(theirs.fileno()),
                        ",".join(map(str, memory)), json.dumps(asdict(self._spec)),
                    ],
                    stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *memory),
                    env=_environment(), start_new_session=True,  # Ctrl-C is for us alone
                )  # fmt: skip
            stack.pop_all()
        ours.setblocking(False)
        worker = _Worker(child, ours, memory, [None] * BLOCKS, set(range(BLOCKS)))
        self._loop.add_reader(ours, self._heard, worker)
        return worker

    def _let_go(self, worker: _Worker) -> None:
        self._loop.remove_reader(worker.channel)
        worker.channel.close()
        for fd in worker.memory:  # what is lent stays mapped
            os.close(fd)
        if worker.alarm is not None:
            worker.alarm.cancel()

    def _lost(self, worker: _Worker) -> None:
        """It has died: another takes its place and its job, unless the job seems to be why."""
        self._workers.remove(worker)
        self._let_go(worker)
        worker.child.kill()
        ended = _ended(worker.child.wait())
        if worker.job is not None:
            self._again(worker.job, ended)
        self._stillborn += not worker.ready
        if self._failed is not None:
            return
        if self._stillborn > len(self._workers) + 1:
            self._give_up(EncodingFailed(f"a process that encodes {ended} before it could begin"))
            return
        try:
            self._workers.add(self._started())
        except OSError as e:
            why = f"a process that encodes {ended}, and no other can be started: {e}"
            self._give_up(EncodingFailed(why, fix=FEWER))

    def _again(self, job: _Job, ended: str) -> None:
        """What a process had that died goes to the next, once."""
        job.lost += 1
        job.request.pop("block", None)
        if job.done.done():
            return
        if self._failed is not None:
            job.done.set_exception(self._failed)
        elif job.lost < ATTEMPTS:
            (self._looks if job.params is None else self._encodes).appendleft(job)
        else:
            why = f"two processes died over one capture, the last {ended}"
            job.done.set_exception(EncodingFailed(why, where=job.request["path"], fix=FEWER))

    def _give_up(self, why: EncodingFailed) -> None:
        self._failed = why
        for queue in (self._looks, self._encodes):
            while queue:
                job = queue.popleft()
                if not job.done.done():
                    job.done.set_exception(why)


def _environment() -> dict[str, str]:
    """Ours, and what this process imports from, in its order: the code at both ends is the same."""
    root = str(
        Path(encode_worker.__file__).parents[2]
    )  # not what the present directory happens to hold
    path = os.pathsep.join(entry or root for entry in sys.path)
    return KEEP_MEMORY | os.environ | {"PYTHONPATH": path}


def _wanted(jobs: deque[_Job]) -> _Job | None:
    """The first that somebody still waits for, taken out."""
    while jobs:
        job = jobs.popleft()
        if not job.done.done():
            return job
    return None


def _ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
