"""`ipc-zstd`: lossless, for any Arrow reader. Two plain columns of bytes; Arrow compresses them.

    exp large_list<uint8> [n*L*H]   the exponent
    sm  large_list<uint8> [n*L*H]   mantissa << 1 | sign
    bf16 bits = (sm & 1) << 15 | exp << 7 | sm >> 1

Nothing in it is mapped: Arrow decompresses a sample whole, on every read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from datagen.store.arrow_row import Buffers, present, two_ends
from datagen.store.codecs._frames import Frames
from datagen.store.codecs._planes import Bits, Bytes, Plane
from datagen.store.codecs._pool import pooled

PLAIN = pa.large_list(pa.field("item", pa.uint8(), nullable=False))


class IpcZstdCodec:
    """Both planes as they are, uint8 [n, L*H] each; no parameters."""

    name = "ipc-zstd"
    version = 1
    lossless = True
    fields = (pa.field("exp", PLAIN, nullable=False), pa.field("sm", PLAIN, nullable=False))
    ipc_compression = "zstd"

    def fit(self, rows_TW: Bits, hidden: int) -> bytes:  # noqa: ARG002
        """Nothing is learnt."""
        return b""

    def encode(
        self, rows_TW: Bits, hidden: int, params: bytes  # noqa: ARG002
    ) -> tuple[Frames, memoryview]:  # fmt: skip
        """The planes. Arrow compresses them when the batch is written."""
        from datagen.store import kernels

        n, width = rows_TW.shape
        exponents_TW, sm_TW = pooled(rows_TW.shape, np.uint8), pooled(rows_TW.shape, np.uint8)
        kernels.split(rows_TW, 0, n, 0, width, _no_bias(width), exponents_TW.reshape(-1), sm_TW)
        return _one(exponents_TW.data.cast("B")), sm_TW.data.cast("B")

    def arrays(self, exp: Frames, sm: Plane) -> list[pa.Array]:
        """One row of `fields`, without a copy."""
        return [_plain_array(exp.data), _plain_array(sm)]

    def stored(self, exp: Buffers, sm: Buffers) -> tuple[Frames, memoryview]:
        """The inverse of `arrays`."""
        return _one(_plain_bytes(exp)), _plain_bytes(sm)

    def decode(
        self,
        exp: Frames,
        sm: Plane,
        n_tokens: int,
        width: int,
        hidden: int,
        params: bytes,  # noqa: ARG002
        tokens: slice,
        layers: Sequence[int],
    ) -> Bits:
        """uint16 [tokens, len(layers), H]."""
        from datagen.store import kernels

        if width % hidden or not all(map(range(width // hidden).__contains__, layers)):
            raise ValueError(f"layers {list(layers)} of {hidden} in {width} values")
        if not exp.n_bytes == len(sm) == n_tokens * width:
            raise ValueError(f"{exp.n_bytes} and {len(sm)} bytes for {n_tokens} x {width}")
        exponents_N = np.frombuffer(exp.data, dtype=np.uint8)
        sm_TW = np.frombuffer(sm, dtype=np.uint8).reshape(n_tokens, width)
        wanted = range(*tokens.indices(n_tokens))
        out_TW = pooled((len(wanted), len(layers) * hidden), np.uint16)
        bias_W = _no_bias(width)
        for place, layer in enumerate(layers):
            source = layer * hidden
            kernels.join(
                exponents_N, wanted.start * width + source, width, 0, len(wanted), sm_TW, wanted.start,
                source, bias_W, out_TW, place * hidden, hidden,
            )  # fmt: skip
        return out_TW.reshape(len(wanted), len(layers), hidden)


def _one(plane: Plane) -> Frames:
    return Frames(plane, np.array([0, len(plane)], dtype=np.int64))


def _no_bias(width: int) -> Bytes:
    return np.zeros(width, dtype=np.uint8)


def _plain_array(plane: Plane) -> pa.Array:
    values = pa.Array.from_buffers(pa.uint8(), len(plane), [None, pa.py_buffer(plane)])
    offsets = pa.py_buffer(np.array([0, len(plane)], dtype=np.int64))
    return pa.Array.from_buffers(PLAIN, 1, [None, offsets], children=[values])


def _plain_bytes(buffers: Buffers) -> memoryview:
    _, ends, holes, data = buffers
    if holes is not None:
        raise ValueError("a plane has holes")
    first, last = two_ends(ends)
    return present(data)[first:last]


CODEC = IpcZstdCodec()
