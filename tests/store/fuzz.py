"""Feed the readers damaged files; only errors of ours may come out. Run as a module:

python -m tests.store.fuzz 200 shard-plane journal

In a process of its own with little memory: an abort or a huge allocation would end it.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datagen.capture.spool import SpoolError, read_spool, write_spool
from datagen.errors import DatagenError
from datagen.store.journal import parse_journal
from datagen.store.run_reader import RunReader
from datagen.store.states import ShardReader, StatesSpec
from tests.store.rows import complete_run, states_like
from tests.store.test_codecs import part_of

MEMORY = 3 << 30
NUMBERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**64 - 1,
]
Reader = Callable[[Path], None]


@st.composite
def damage(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with a few things wrong: flipped, overwritten by a number, cut, doubled, swapped."""
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        kind = draw(st.sampled_from(["flip", "number", "cut", "drop", "double", "move"]))
        length = draw(st.sampled_from([1, 4, 8, 64, 1000]))
        if kind == "flip" and raw:
            raw[at] ^= draw(st.integers(1, 255))
        elif kind == "number":
            size = draw(st.sampled_from([1, 2, 4, 8]))
            number = draw(st.sampled_from(NUMBERS)) % (1 << 8 * size)
            raw[at : at + size] = number.to_bytes(size, "little")
        elif kind == "cut":
            del raw[at:]
        elif kind == "drop":
            del raw[at : at + length]
        elif kind == "double":
            raw[at:at] = raw[at : at + length]
        elif kind == "move":
            piece = bytes(raw[at : at + length])
            del raw[at : at + length]
            to = draw(st.integers(0, len(raw)))
            raw[to:to] = piece
    return bytes(raw)


def read_shard(path: Path) -> None:
    """Everything a shard gives."""
    shard = ShardReader(path)
    shard.token_columns()
    for row in range(min(len(shard), 4)):
        shard.columns(row)
        shard.states(row)
        shard.states(row, tokens=slice(1, 3), layers=[0])
        shard.raw_plane(row)
        shard.stored_bytes(row)


def read_open_shard(path: Path) -> None:
    """A part, up to its end."""
    shard = ShardReader(path, end=path.stat().st_size)
    for row in range(min(len(shard), 4)):
        shard.states(row)


def read_run(path: Path) -> None:
    """A run whose manifest may be damaged."""
    run = RunReader.open(path)
    for number in range(min(len(run), 3)):
        run.columns(number)
        run.states(number)


def read_journal_bytes(path: Path) -> None:
    """A journal."""
    parse_journal(path.read_bytes(), path)


def cases(folder: Path) -> dict[str, tuple[bytes, Path, Reader]]:
    """Format -> whole content, where the damaged one goes, and what reads it."""
    found: dict[str, tuple[bytes, Path, Reader]] = {}
    for codec in ("plane", "ipc-zstd", "mantissa-4"):
        spec = StatesSpec((1, 3, 4), "post", "BF16", 16, codec)
        path = folder / f"{codec}.arrow"
        file = part_of(path, spec, [states_like(n, seed=n, spec=spec) for n in (9, 20)])
        file.sync()
        growing = Path(f"{path}.part").read_bytes()
        file.seal()
        found[f"shard-{codec}"] = (path.read_bytes(), folder / "bad.arrow", read_shard)
        found[f"part-{codec}"] = (growing, folder / "bad.part", read_open_shard)
    root = folder / "run"
    complete_run(root)
    manifest, journal = root / "manifest.json", root / "partitions" / "00000" / "journal.log"
    found["manifest"] = (manifest.read_bytes(), manifest, read_run)
    found["journal"] = (journal.read_bytes(), folder / "bad.log", read_journal_bytes)
    spool = folder / "whole.safetensors"
    rows = states_like(5)
    write_spool(
        spool, rows=[rows.data], n_tokens=5, width=rows.shape[1], dtype="BF16", input_ids=bytes(20),
        metadata={"rid": "r", "boundaries": "1,3,4", "hidden": "16", "final_norm": "post", "server": "s"},
    )  # fmt: skip
    found["spool"] = (spool.read_bytes(), folder / "bad.safetensors", lambda p: void(read_spool(p)))
    return found


def void(_: object) -> None:
    """Take a result and be silent."""


def refused(case: tuple[bytes, Path, Reader], examples: int) -> int:
    """Read so many damaged files of a format; how many were refused."""
    whole, path, read = case
    path.write_bytes(whole)
    read(path)
    count = 0

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(damage(whole))
    def one(content: bytes) -> None:
        nonlocal count
        path.write_bytes(content)
        try:
            read(path)
        except (DatagenError, SpoolError):
            count += 1

    one()
    path.write_bytes(whole)
    return count


def main(examples: int, names: list[str]) -> None:
    """Fuzz the formats in turn; prints the counts as JSON."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        found = cases(Path(folder))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        counts = {name: refused(found[name], examples) for name in names}
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
