"""The process that writes what a carrier hands over, and what the two say. Standard library alone.

They share some blocks of memory, its slots (memfd, inherited). A message: two little-endian u32, the length
of what follows and the slot; then a JSON list with one list a capture, whose rows and ids lie in the slot
one after the other. It is answered with the bytes of rows that are published or have failed, a
little-endian u64; while it takes long, in several. Once all of it is answered its slot may be filled again.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from datagen.capture.spool import leave_note, write_spool

log = logging.getLogger(__name__)
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
    """Of rows."""


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


def message(jobs: Sequence[Job], slot: int) -> bytes:
    """What is said of `jobs`, whose bytes lie in `slot`."""
    described = json.dumps(
        [
            [j.path, j.n_tokens, j.width, j.dtype, j.metadata, j.n_bytes, len(j.input_ids)]
            for j in jobs
        ]
    ).encode()
    return SIZES.pack(len(described), slot) + described


def parts_of(jobs: Sequence[Job]) -> list[bytes | memoryview]:
    """What lies in the slot of a message about `jobs`."""
    parts: list[bytes | memoryview] = []
    for job in jobs:
        parts += [*job.pieces, job.input_ids]
    return parts


class _Slot:
    """A block of shared memory, as far as it has been used."""

    def __init__(self, fd: int) -> None:
        self._fd, self._view = fd, memoryview(b"")

    def first(self, n_bytes: int) -> memoryview:
        if len(self._view) < n_bytes:
            self._view = memoryview(mmap.mmap(self._fd, n_bytes, access=mmap.ACCESS_READ))
        return self._view[:n_bytes]


def _filled(fd: int, view: memoryview) -> bool:
    """Fill `view` from `fd`; False when it ends before."""
    at = 0
    while at < len(view):
        read = os.readv(fd, [view[at:]])
        if not read:
            return False
        at += read
    return True


def serve(source: int, answers: int, slots: Sequence[int]) -> None:
    """Publish what messages at `source` name until it ends; one that ends in its middle is dropped."""
    blocks = [_Slot(fd) for fd in slots]
    sizes = bytearray(SIZES.size)
    while _filled(source, memoryview(sizes)):
        length, slot = SIZES.unpack(sizes)
        described = bytearray(length)
        if not _filled(source, memoryview(described)):
            return
        captures = json.loads(described)
        body = blocks[slot].first(sum(n_rows + n_ids for *_, n_rows, n_ids in captures))
        at = done = 0
        told_at = time.monotonic()
        for path, n_tokens, width, dtype, metadata, n_rows, n_ids in captures:
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
    serve(0, 1, list(map(int, sys.argv[1:])))


if __name__ == "__main__":
    _main()
