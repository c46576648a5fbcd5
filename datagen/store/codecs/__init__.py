"""Codecs of hidden states. A codec is one file: a module here that sets `CODEC` is registered.

A codec turns the rows of a sample, uint16 bit patterns [n, L*H], into the columns `exp` and `sm` of
its shard, and back. Whatever it learns from the first sample of a shard is `params`, kept in the
schema beside the codec's name and version. Modules with a leading underscore are parts of several.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datagen.errors import ConfigError
from datagen.store.arrow_row import Buffers
from datagen.store.codecs._frames import Frames as Frames

Rows = NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One sample, encoded: `exp` frames in the codec's order, `sm` the raw plane.

    `params`: the shard parameters it was encoded with; it can only be stored beside the same.
    `shape`: of the rows, tokens and values a token.
    """

    exp: Frames
    sm: bytes | memoryview
    params: bytes
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Stored size, before Arrow's own compression where the codec leaves that to it."""
        return self.exp.n_bytes + len(self.sm)


class Codec(Protocol):
    """One way to store rows. Stateless and thread-safe."""

    name: str
    version: int
    lossless: bool
    fields: tuple[pa.Field, ...]
    """The columns `exp` and `sm` of a shard."""
    ipc_compression: str | None
    """What Arrow compresses the buffers of a shard with; None where the codec has done it."""

    def fit(self, rows_TW: Rows, hidden: int) -> bytes:
        """Shard parameters, learnt from the first sample."""
        ...

    def encode(
        self, rows_TW: Rows, hidden: int, params: bytes
    ) -> tuple[Frames, bytes | memoryview]:
        """Frames and raw plane of one sample, on the calling thread, mostly outside the GIL."""
        ...

    def arrays(self, exp: Frames, sm: bytes | memoryview) -> list[pa.Array]:
        """The columns of one sample, in the order of `fields`."""
        ...

    def stored(self, exp: Buffers, sm: Buffers) -> tuple[Frames, memoryview]:
        """Frames and raw plane out of the buffers of the two columns of one sample, not copied.

        Raises ValueError, struct.error.
        """
        ...

    def decode(
        self,
        exp: Frames,
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


def _discovered() -> dict[str, Codec]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    codecs: list[Codec] = [importlib.import_module(f"{__name__}.{n}").CODEC for n in names]
    return {codec.name: codec for codec in codecs}


REGISTRY: dict[str, Codec] = _discovered()
DEFAULT = "plane"


def codec_named(name: str) -> Codec:
    """A codec by its name; raises ConfigError naming the known ones."""
    try:
        return REGISTRY[name]
    except KeyError:
        raise ConfigError(
            f"unknown codec '{name}'", fix=f"use one of {', '.join(REGISTRY)}"
        ) from None
