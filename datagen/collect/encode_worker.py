"""The process at the other end of `encode_processes.py`: looks at spool files, and encodes them.

    python -m datagen.collect.encode_worker SOCKET BLOCK,BLOCK SPEC

SOCKET, BLOCK: inherited descriptors, of a SOCK_SEQPACKET socket and of memory files. SPEC: the fields of a
StatesSpec as JSON. It says `{}` once it can work. Then, one at a time, as JSON:
    {"path", "idle", "n_tokens"}                 -> {"sound": norms} or {"refused": [reason, detail]}
    {"path", "idle", "params" (base64), "block"} -> {"exp": sizes, "sm": size, "shape"}: the frames one after
                                                    the other, then the plane, from the begin of the block on
"idle": blocks that nobody looks at. Or {"torn": text}, {"gone": text}, {"failed": text}. It ends with the
socket.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datagen.capture.spool import SpoolError, SpoolFile, map_spool, read_spool
from datagen.store.guards import Sound, examine
from datagen.store.states import StatesSpec, encode

MESSAGE_BYTES = 1 << 20
KEPT_BYTES = 128 << 20  # of a block: what a longer sample needed more is given back


class Block:
    """Memory that both processes map; it grows with what it must hold. Not copied out: it is written from."""

    def __init__(self, fd: int) -> None:
        self._fd, self._map = fd, mmap.mmap(-1, 1)

    def shrink(self) -> None:
        """Give back what a longer sample needed; nothing in it is wanted any more."""
        if os.fstat(self._fd).st_size > KEPT_BYTES:
            os.ftruncate(self._fd, KEPT_BYTES)
            self._map = mmap.mmap(-1, 1)

    def fill(self, parts: Sequence[bytes | memoryview]) -> None:
        """Put `parts` there, one after the other."""
        needed = sum(map(len, parts))
        if os.fstat(self._fd).st_size < needed:
            os.ftruncate(self._fd, needed)
        if len(self._map) < needed:
            self._map = mmap.mmap(self._fd, needed)
        view, at = memoryview(self._map), 0
        for part in parts:
            view[at : at + len(part)] = part
            at += len(part)


def serve(channel: socket.socket, blocks: Sequence[Block], spec: StatesSpec) -> None:
    """Answer until the other side goes."""
    channel.send(b"{}")
    while request := channel.recv(MESSAGE_BYTES):
        channel.send(json.dumps(answer(json.loads(request), blocks, spec)).encode())


def answer(request: dict[str, Any], blocks: Sequence[Block], spec: StatesSpec) -> dict[str, Any]:
    """What is said to one request; no error of a capture ends the process."""
    path = Path(request["path"])
    for idle in request["idle"]:
        blocks[idle].shrink()
    try:
        if "n_tokens" in request:
            found = examine(rows_of(read_spool(path)), request["n_tokens"], spec)
            if isinstance(found, Sound):
                return {"sound": found.norms}
            return {"refused": [found.reason, found.detail]}
        rows_TW = rows_of(map_spool(path))
        encoded = encode(spec, base64.b64decode(request["params"]), rows_TW)
        blocks[request["block"]].fill([*encoded.exp, encoded.sm])
        return {
            "exp": [*map(len, encoded.exp)], "sm": len(encoded.sm), "shape": encoded.shape
        }  # fmt: skip
    except FileNotFoundError:
        return {"gone": f"{path} is gone: did somebody sweep the spool?"}
    except SpoolError as e:
        return {"torn": str(e)}
    except Exception as e:  # noqa: BLE001 - told to the other side, which stops the run
        traceback.print_exc()
        return {"failed": f"{type(e).__name__}: {e}"}


def rows_of(spooled: SpoolFile) -> NDArray[np.uint16]:
    """As `target.capture.rows_of`, without the imports of a client: half of what a start takes."""
    return np.frombuffer(spooled.rows, dtype=np.uint16).reshape(spooled.n_tokens, spooled.width)


def main(fd: str, blocks: str, spec: str) -> None:
    """Entry of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all; the collector drains first
        signal.signal(number, signal.SIG_IGN)  # its end is the end of the socket
    given = json.loads(spec)
    given["boundaries"] = tuple(given["boundaries"])
    with socket.socket(fileno=int(fd)) as channel:
        try:
            serve(channel, [Block(int(n)) for n in blocks.split(",")], StatesSpec(**given))
        except (BrokenPipeError, ConnectionResetError):
            sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
