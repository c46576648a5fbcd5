"""Data files to raw rows. A damaged line is a Fault and never stops the file; a damaged file does.

JSON lines are split on the byte 0x0A only: U+2028, U+0085 and their kind are text. `.zst` files may
have several frames and windows up to 256 MiB. Parquet and Arrow rows arrive as dicts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from datagen.errors import PromptDataError

MAX_LINE_BYTES = 8 << 20
READ_BYTES = 1 << 20
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line of a file, its line feed removed. `number` counts from 1."""

    number: int
    data: bytes
    ends_file: bool = False
    """True for a last line that no line feed ends."""
    bytes_skipped: int = 0
    """What of an over-long line was not kept."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a raw row gives no prompt. `reason` is a short fixed phrase, `detail` the particulars."""

    reason: str
    detail: str = ""


def read_lines(path: Path) -> Iterator[RawLine]:
    """The lines of a .jsonl or .jsonl.zst file. Raises PromptDataError, naming the file."""
    try:
        with path.open("rb") as file:
            blocks = _decompressed(file, path) if path.suffix == ".zst" else _blocks(file)
            yield from _split(blocks, path)
    except OSError as e:
        raise PromptDataError(
            f"the data file cannot be read: {e.strerror or e}",
            where=path,
            fix="check the path and its permissions",
        ) from e


def read_table_rows(path: Path, batch_rows: int = 1024) -> Iterator[dict[str, Any]]:
    """The rows of a .parquet, .arrow or .feather file, as dicts. Raises PromptDataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as parquet:
                for batch in parquet.iter_batches(batch_size=batch_rows):
                    yield from batch.to_pylist()
        else:
            with pa.OSFile(str(path)) as source:
                for batch in _arrow_batches(pa, source):
                    for start in range(0, batch.num_rows, batch_rows):
                        yield from batch.slice(start, batch_rows).to_pylist()
    except (OSError, pa.ArrowException) as e:
        raise PromptDataError(
            f"the data file cannot be read: {str(e).splitlines()[0]}",
            where=path,
            fix="check that it is whole and of the kind its name says",
        ) from e


def parse_line(line: RawLine) -> Any | Fault | None:
    """The JSON value of a line; None for a blank line; a Fault for one that has no JSON value."""
    data = line.data
    if line.bytes_skipped:
        return Fault("line_too_long", f"{len(data) + line.bytes_skipped:,} bytes")
    if line.number == 1:
        data = data.removeprefix(UTF8_MARK)
    if not data.strip():
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _parse_slowly(data, line.ends_file)


def _parse_slowly(data: bytes, ends_file: bool) -> Any | Fault:
    """What orjson refuses and JSON readers commonly take (NaN, huge integers), or the Fault."""
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as e:
        return Fault("bad_utf8", f"byte {e.start}")
    except (ValueError, RecursionError) as e:
        return Fault("bad_json_eof" if ends_file else "bad_json", str(e) or "nested too deeply")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(READ_BYTES):
        yield block


def _decompressed(file: BinaryIO, path: Path) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**28)
    stream = None
    try:
        for block in _blocks(file):
            rest = block
            while rest:
                stream = stream or decompressor.decompressobj()
                if out := stream.decompress(rest):
                    yield out
                rest = stream.unused_data if stream.eof else b""
                stream = None if stream.eof else stream
    except zstandard.ZstdError as e:
        raise PromptDataError(
            f"the file is no valid zstd: {e}", where=path, fix="fetch it again"
        ) from e
    if stream is not None:
        raise PromptDataError(
            "the file is cut off in the middle of a zstd frame", where=path, fix="fetch it again"
        )


def _split(blocks: Iterator[bytes], path: Path) -> Iterator[RawLine]:
    number, held, skipped = 1, b"", 0
    for block in blocks:
        if number == 1 and not held and block.startswith(UTF16_MARKS):
            raise PromptDataError(
                "the file is UTF-16", where=path, fix="convert it to UTF-8 (iconv -t UTF-8)"
            )
        first, *others = block.split(b"\n")
        for piece in (first, *others[:-1]) if others else ():
            line, held = held + piece, b""
            yield RawLine(number, line, bytes_skipped=skipped)
            number, skipped = number + 1, 0
        held += others[-1] if others else first
        if len(held) > MAX_LINE_BYTES:
            skipped, held = skipped + len(held) - MAX_LINE_BYTES, held[:MAX_LINE_BYTES]
    if held or skipped:
        yield RawLine(number, held, ends_file=True, bytes_skipped=skipped)


def _arrow_batches(pa: Any, source: Any) -> Iterator[Any]:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if is_file:
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(source)
