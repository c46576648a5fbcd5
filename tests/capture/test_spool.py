"""The spool's checksum: one sum, whoever computes it."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from datagen.capture.spool import SpoolError, read_spool, write_spool

ROWS = np.random.default_rng(0).integers(0, 65536, (9, 64), dtype=np.uint16)
WRITE = """
import sys
if sys.argv[2] == "bare":
    sys.modules["isal"] = None  # as where only the plugin is installed
from datagen.capture import spool
assert spool.crc32.__module__ == ("zlib" if sys.argv[2] == "bare" else "isal.isal_zlib"), spool.crc32
rows = open(sys.argv[1] + ".rows", "rb").read()
spool.write_spool(sys.argv[1], rows=[memoryview(rows)[:128], memoryview(rows)[128:]], n_tokens=9, width=64,
    dtype="BF16", input_ids=bytes(36), metadata={"rid": "r", "boundaries": "1", "hidden": "32",
    "final_norm": "post", "server": "s"})
"""


@pytest.mark.parametrize("environment", ["bare", "whole"])
def test_an_engine_without_isal_writes_the_same_file(tmp_path: Path, environment: str) -> None:
    path = tmp_path / "a.safetensors"
    Path(f"{path}.rows").write_bytes(ROWS.tobytes())
    subprocess.run([sys.executable, "-c", WRITE, str(path), environment], check=True, timeout=120)
    spooled = read_spool(path)
    assert spooled.rows == ROWS.tobytes()
    assert spooled.crc32 == zlib.crc32(ROWS.tobytes())


def test_a_flipped_bit_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_spool(
        path, rows=[ROWS.data], n_tokens=9, width=64, dtype="BF16", input_ids=bytes(36),
        metadata={"rid": "r", "boundaries": "1", "hidden": "32", "final_norm": "post", "server": "s"},
    )  # fmt: skip
    whole = bytearray(path.read_bytes())
    whole[len(whole) - 200] ^= 1
    path.write_bytes(whole)
    with pytest.raises(SpoolError, match="checksum"):
        read_spool(path)
