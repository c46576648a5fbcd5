"""The spool: files through which an engine hands hidden states to the collector. Stdlib and isal.

One safetensors file per capture request, named `<sha256(rid)[:32]>.safetensors`, published whole by
rename with mode 0600. Tensors, in this order:
    rows       [n, (K+1)*H]  BF16 (F16, F32)  K boundaries in order, then the final state; row i = token i
    input_ids  [n]           I32              the ids the engine prefilled
    crc32      [1]           U32              CRC-32 (zlib's) of the bytes of `rows`
`__metadata__` holds strings: rid, boundaries (comma separated Hugging Face indices), hidden,
final_norm, server. `<path>.err` appears in place of the file when the write failed. What was read may
leave its memory to the next (spares.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import stat
import struct
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datagen.capture import spares

try:  # the same sums, four times as fast: a collector always has it, an engine's environment may not
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

log = logging.getLogger(__name__)
PROTOCOL = 1  # of request, answer and file together; an engine's answer names the one it speaks
SUFFIX = ".safetensors"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
MAX_HEADER_BYTES = 1 << 20
MAX_PARTS = 512  # of one writev; the system's own limit is 1024
STALE_S, HALF_WRITTEN_S = 900.0, 60.0  # untouched for that long, nobody will come for a file
NAME = re.compile(rf"[0-9a-f]{{32}}\.safetensors(\.\d+\.tmp|\.err)?|{spares.NAME}")


class SpoolError(Exception):
    """A spool file is torn, inconsistent or not what was asked for; the capture must be repeated."""


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """One capture. `rows` is a buffer of n * width items of `dtype`, row-major."""

    rid: str
    n_tokens: int
    width: int
    dtype: str
    boundaries: tuple[int, ...]
    hidden: int
    final_norm: str
    server: str
    rows: memoryview
    input_ids: tuple[int, ...]
    crc32: int
    """What the engine says the rows sum to."""


def default_spool(port: int) -> Path:
    """Memory if there is a /dev/shm, else the temporary directory; one per user and port."""
    memory = Path("/dev/shm")
    root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"datagen-spool-{os.getuid()}-{port}"


def spool_name(rid: str) -> str:
    """The name of the file of request `rid`; it cannot leave its directory."""
    return hashlib.sha256(rid.encode()).hexdigest()[:32] + SUFFIX


def spool_path(directory: str | Path, rid: str) -> Path:
    """Where the capture of request `rid` appears."""
    return Path(directory) / spool_name(rid)


def write_spool(
    path: str | Path,
    *,
    rows: Sequence[bytes | memoryview],
    n_tokens: int,
    width: int,
    dtype: str,
    input_ids: bytes | memoryview,
    metadata: Mapping[str, str],
) -> int:
    """Publish one capture atomically; returns its size in bytes.

    `rows`: consecutive row-major pieces; `input_ids`: little-endian int32. Raises ValueError when
    the pieces do not add up, OSError when the write fails (nothing is left behind).

    Runs beside an engine's scheduler, in the same interpreter: few calls, the long ones outside its lock.
    """
    pieces = [memoryview(p).cast("B") for p in rows]
    end = sum(p.nbytes for p in pieces)
    ids = memoryview(input_ids).cast("B")
    if end != n_tokens * width * ITEM_BYTES[dtype] or ids.nbytes != 4 * n_tokens:
        raise ValueError(
            f"{end} bytes of rows and {ids.nbytes} of ids for {n_tokens} x {width} {dtype}"
        )
    crc = 0
    for piece in pieces:
        crc = crc32(piece, crc)
    tail = end + ids.nbytes
    header = (
        f'{{"__metadata__":{json.dumps(dict(metadata))},'
        f'"rows":{{"dtype":"{dtype}","shape":[{n_tokens},{width}],"data_offsets":[0,{end}]}},'
        f'"input_ids":{{"dtype":"I32","shape":[{n_tokens}],"data_offsets":[{end},{tail}]}},'
        f'"crc32":{{"dtype":"U32","shape":[1],"data_offsets":[{tail},{tail + 4}]}}}}'
    ).encode()
    header += b" " * (-len(header) % 8)
    parts: list[bytes | memoryview] = [
        struct.pack("<Q", len(header)) + header,
        *pieces,
        ids,
        struct.pack("<I", crc),
    ]
    size = sum(map(len, parts))
    temporary = f"{path}.{threading.get_native_id()}.tmp"  # one rid may be asked for twice
    try:
        spare = spares.take(temporary, size)
        create = 0 if spare else os.O_CREAT | os.O_TRUNC
        fd = os.open(temporary, os.O_WRONLY | os.O_NOFOLLOW | create, 0o600)
        try:
            if spare:
                os.ftruncate(fd, size)
                os.fchmod(fd, 0o600)
            write_all(fd, parts)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return size


def write_all(fd: int, parts: Sequence[bytes | memoryview], at: int | None = None) -> None:
    """Write `parts` one after the other, in one call where the system lets it be one. Raises OSError.

    `at`: the offset of the first; without it they follow what was written before.
    """
    left = [memoryview(p) for p in parts if len(p)]
    while left:
        some = left[:MAX_PARTS]
        written = os.writev(fd, some) if at is None else os.pwritev(fd, some, at)
        at = None if at is None else at + written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def read_spool(path: Path) -> SpoolFile:
    """Map and verify one capture: header, lengths, checksum. Raises SpoolError, FileNotFoundError.

    The rows stay mapped (no copy) and remain valid after the file is unlinked.
    """
    spooled = _mapped(path)
    if crc32(spooled.rows) != spooled.crc32:
        raise SpoolError(f"{path}: checksum of the rows differs")
    return spooled


def _mapped(path: Path) -> SpoolFile:
    """One capture whose rows nobody has looked at."""
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        if size < 16:
            raise SpoolError(f"{path}: {size} bytes is no safetensors file")
        view = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    (length,) = struct.unpack_from("<Q", view)
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise SpoolError(f"{path}: header of {length} bytes in a file of {size}")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        meta, rows_at = header["__metadata__"], header["rows"]
        n_tokens, width = map(int, rows_at["shape"])
        dtype = str(rows_at["dtype"])
        end = n_tokens * width * ITEM_BYTES[dtype]
        expected = {
            "rows": [0, end],
            "input_ids": [end, end + 4 * n_tokens],
            "crc32": [end + 4 * n_tokens, end + 4 * n_tokens + 4],
        }
        for name, offsets in expected.items():
            if header[name]["data_offsets"] != offsets:
                raise SpoolError(
                    f"{path}: tensor {name} lies at {header[name]['data_offsets']}, not {offsets}"
                )
        boundaries = tuple(int(b) for b in meta["boundaries"].split(","))
        hidden, final_norm = int(meta["hidden"]), str(meta["final_norm"])
        rid, server = str(meta["rid"]), str(meta["server"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as e:
        raise SpoolError(f"{path}: unreadable header: {type(e).__name__}: {e}") from e
    base = 8 + length
    if n_tokens < 1 or width < 1 or size != base + end + 4 * n_tokens + 4:
        raise SpoolError(f"{path}: {size} bytes do not hold {n_tokens} x {width} {dtype}")
    rows = view[base : base + end]
    (stated,) = struct.unpack_from("<I", view, size - 4)
    ids = struct.unpack_from(f"<{n_tokens}i", view, base + end)
    return SpoolFile(
        rid, n_tokens, width, dtype, boundaries, hidden, final_norm, server, rows, ids, stated
    )


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed: files, and the bytes they held."""

    n_files: int
    n_bytes: int


def sweep(directory: Path, *, older_than_s: float, now: float) -> Swept:
    """Remove captures, error notes and half-written files that nobody touched for `older_than_s`.

    A half-written file grows while its writer lives, so `HALF_WRITTEN_S` without growth is enough; spares
    are gone in moments where there is work. Files of other names stay. Raises OSError when the directory
    cannot be read.
    """
    n_files = n_bytes = 0
    for entry in os.scandir(directory):
        if not NAME.fullmatch(entry.name):
            continue
        brief = not entry.name.endswith((SUFFIX, ".err"))
        limit_s = min(older_than_s, HALF_WRITTEN_S) if brief else older_than_s
        try:
            found = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or now - found.st_mtime < limit_s:
                continue
            os.unlink(entry.path)
        except FileNotFoundError:  # its reader was first
            continue
        n_files, n_bytes = n_files + 1, n_bytes + found.st_size
    return Swept(n_files, n_bytes)


def leave_note(path: str, text: str) -> None:
    """Leave `<path>.err` in place of a capture that failed."""
    note = f"{path}.err"
    try:
        with open(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            f.write(text)
    except OSError as e:  # the client times out on the file instead
        log.error("cannot leave the note %s: %s", note, e)


def discard(path: Path) -> None:
    """Remove a capture and its error note; absent files are fine. Rows that are mapped stay valid."""
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".err").unlink(missing_ok=True)
