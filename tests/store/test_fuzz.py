"""No reader crashes, allocates without measure, or lets a foreign error out, whatever it is given."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from datagen.capture.spool import SpoolError, read_spool

FORMATS = ["shard-plane", "shard-ipc-zstd", "shard-mantissa-4", "part-plane", "part-ipc-zstd",
           "part-mantissa-4", "manifest", "journal", "spool"]  # fmt: skip


def refused(examples: int, *names: str) -> dict[str, int]:
    """Format -> how many of the damaged files were refused; the others gave data."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.fuzz", str(examples), *names],
        capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-3000:]}"
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def test_damage_is_an_error_of_ours_or_other_data() -> None:
    counts = refused(60, *FORMATS)
    assert list(counts) == FORMATS
    assert min(counts.values()) > 6, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_much_damage_is_an_error_of_ours_or_other_data(name: str) -> None:
    assert refused(3000, name)[name] > 300


@pytest.mark.parametrize(
    "header",
    [
        "[" * 500_000,
        json.dumps({"__metadata__": {}, "rows": {"dtype": "BF16", "shape": [1e999, 2]}}),
        json.dumps({"__metadata__": {}, "rows": {"dtype": ["BF16"], "shape": [1, 2]}}),
        '{"__metadata__": {}, "rows": {"dtype": "BF16", "shape": [Infinity, 1]}}',
        '{"rows": [], "__metadata__": 7}',
        "[1, 2]",
    ],
)
def test_a_spool_header_of_any_json_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))
    with pytest.raises(SpoolError):
        read_spool(path)
