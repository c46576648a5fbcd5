"""A few tensors of a checkpoint directory as float32, read without torch: what checks compare with.

Shape suffixes: V vocabulary, H hidden.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile

Float = NDArray[np.float32]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
STORED: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
BLOCK_ROWS = 8192


class NoTensor(Exception):
    """The checkpoint has no such tensor, or keeps it in a type that is not read here."""


def as_float32(stored: NDArray[Any], dtype: str) -> Float:
    """Values of a safetensors type (BF16 as uint16 bit patterns) as float32."""
    if dtype == "BF16":
        bits = np.empty(stored.shape, np.uint32)  # one pass: astype and a shift would be two
        np.left_shift(stored, np.uint32(16), out=bits, dtype=np.uint32, casting="unsafe")
        return bits.view(np.float32)
    if dtype == "F16" and stored.dtype == np.uint16:
        stored = stored.view(np.float16)
    return stored.astype(np.float32)


class Checkpoint:
    """A directory of config.json and safetensors files, mapped and read on demand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    @classmethod
    def found(cls, directory: Path | None) -> Checkpoint | None:
        """The checkpoint of a directory, or None where no weights lie."""
        if directory is None or not (directory / "config.json").is_file():
            return None
        has = any((directory / name).is_file() for name in (INDEX, SINGLE))
        return cls(directory) if has else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, or the text part of a model of several kinds. Raises CorruptFile."""
        raw = _json(self.directory / "config.json")
        inner = raw.get("text_config")
        return {**raw, **inner} if isinstance(inner, dict) else raw

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(f.stat().st_size for f in self.directory.glob("*.safetensors"))

    def tensor(self, name: str) -> Float:
        """A whole tensor as float32. Raises NoTensor, CorruptFile."""
        stored, dtype = self._stored(name)
        return as_float32(stored, dtype)

    def rows(self, name: str, start: int, stop: int) -> Float:
        """Rows of a matrix as float32. Raises NoTensor, CorruptFile."""
        stored, dtype = self._stored(name)
        return as_float32(stored[start:stop], dtype)

    def blocks(self, name: str) -> Iterator[Float]:
        """A matrix [V, H] in blocks of rows, so that its float32 copy is never held whole."""
        stored, dtype = self._stored(name)
        for start in range(0, len(stored), BLOCK_ROWS):
            yield as_float32(stored[start : start + BLOCK_ROWS], dtype)

    def has(self, name: str) -> bool:
        """True when a tensor of that name is stored."""
        return name in self._files

    @cached_property
    def _files(self) -> dict[str, str]:
        if (self.directory / INDEX).is_file():
            return dict(_json(self.directory / INDEX)["weight_map"])
        return {name: SINGLE for name in self._header(SINGLE)[0] if name != "__metadata__"}

    def _header(self, file: str) -> tuple[dict[str, Any], int]:
        if file not in self._headers:
            path = self.directory / file
            try:
                with open(path, "rb") as f:
                    (length,) = struct.unpack("<Q", f.read(8))
                    self._headers[file] = json.loads(f.read(length)), 8 + length
            except (OSError, ValueError, struct.error) as e:
                raise CorruptFile(f"no safetensors file: {e}", where=path) from e
        return self._headers[file]

    def _stored(self, name: str) -> tuple[NDArray[Any], str]:
        if name not in self._files:
            raise NoTensor(f"{self.directory} has no tensor {name}")
        file = self._files[name]
        header, base = self._header(file)
        entry = header[name]
        if entry["dtype"] not in STORED:
            raise NoTensor(f"{name} is stored as {entry['dtype']}")
        mapped: NDArray[Any] = np.memmap(
            self.directory / file, STORED[entry["dtype"]], "r",
            base + int(entry["data_offsets"][0]),
            tuple(entry["shape"]),
        )  # fmt: skip
        return mapped, str(entry["dtype"])


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CorruptFile(f"no JSON: {e}", where=path) from e
    if not isinstance(found, dict):
        raise CorruptFile("no JSON object", where=path)
    return found
