"""Codecs of hidden states. A codec is one file: write it, add it to REGISTRY.

A codec turns the rows of a sample, uint16 bit patterns [n, L*H], into compressed frames and one raw
plane, and back. Whatever it learns from the first sample of a shard is `params`, kept in the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from datagen.errors import ConfigError
from datagen.store.codecs.plane import PlaneCodec

Rows = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample, encoded: `exp` frames in the codec's order, `sm` the raw plane."""

    exp: list[bytes]
    sm: bytes | memoryview

    @property
    def n_bytes(self) -> int:
        """Stored size."""
        return sum(map(len, self.exp)) + len(self.sm)


class Codec(Protocol):
    """One way to store rows. Stateless and thread-safe."""

    name: str
    version: int
    lossless: bool

    def fit(self, rows_TW: Rows, hidden: int) -> bytes:
        """Shard parameters, learnt from the first sample."""
        ...

    def encode(self, rows_TW: Rows, hidden: int, params: bytes) -> tuple[list[bytes], memoryview]:
        """Frames and raw plane of one sample."""
        ...

    def decode(
        self,
        exp: Sequence[bytes | memoryview],
        sm: bytes | memoryview,
        n_tokens: int,
        width: int,
        hidden: int,
        params: bytes,
        tokens: slice,
        layers: Sequence[int],
    ) -> Rows:
        """uint16 [tokens, len(layers), H]. Raises ValueError when the bytes do not fit the shape."""
        ...


REGISTRY: dict[str, Codec] = {c.name: c for c in (PlaneCodec(),)}


def codec_named(name: str) -> Codec:
    """A codec by its name; raises ConfigError naming the known ones."""
    try:
        return REGISTRY[name]
    except KeyError:
        raise ConfigError(
            f"unknown codec '{name}'", fix=f"use one of {', '.join(REGISTRY)}"
        ) from None
