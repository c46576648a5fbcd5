"""`mantissa-4`: lossy. The mantissa is rounded to 4 of its 7 bits, to nearest, ties to even.

Every finite element is off by at most 2^-5 of itself (denormals by 4 of their steps), whatever the
outliers around it, for there is no scale to share; nothing finite becomes infinite, and NaN, infinities,
zeros and signs stay what they are. Encoding what was decoded changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from datagen.store.arrow_row import Buffers
from datagen.store.codecs import _planes as planes
from datagen.store.codecs._frames import Frames
from datagen.store.codecs._planes import Bits, Bytes, Plane
from datagen.store.codecs._pool import pooled

LARGEST, INFINITY, QUIET = 0x7F78, 0x7F80, 0x0040
DROPPED_BITS = 3


def rounded(rows_TW: Bits) -> Bits:
    """Bit patterns whose last three bits are zero, nearest to those given."""
    magnitude = rows_TW & 0x7FFF
    nearest: Bits = magnitude + np.uint16(3) + ((magnitude >> DROPPED_BITS) & 1)
    nearest &= 0xFFF8
    np.minimum(nearest, LARGEST, out=nearest)
    special = magnitude >= INFINITY
    if special.any():
        kept = magnitude[special]
        nearest[special] = np.where(kept > INFINITY, (kept & 0xFFF8) | QUIET, kept)
    nearest |= rows_TW & 0x8000
    return nearest


class Mantissa4Codec:
    """Exponents as in `plane`; the rest packed: 5 bits an element.

    `exp`: as in `plane`. `sm`, a token after the other: ceil(W/2) bytes of mantissas (element i in the
    high half of byte i, element i + ceil(W/2) in its low half), then ceil(W/8) bytes of signs, first
    element in the highest bit. `params`: the bias, uint8 [L*H].
    """

    name = "mantissa-4"
    version = 1
    lossless = False
    fields = planes.FRAMED_FIELDS
    ipc_compression = None

    def fit(self, rows_TW: Bits, hidden: int) -> bytes:  # noqa: ARG002
        """The median exponent of every channel."""
        return planes.median_exponents(rounded(rows_TW[: planes.FIT_TOKENS])).tobytes()

    def encode(self, rows_TW: Bits, hidden: int, params: bytes) -> tuple[Frames, memoryview]:
        """Frames of exponents, and the packed rest."""
        n, width = rows_TW.shape
        bias_W = np.frombuffer(params, dtype=np.uint8)
        packed_TB = pooled((n, _packed_width(width)), np.uint8)
        frames = []
        for first in planes.blocks(n):
            block = slice(first, first + planes.BLOCK_TOKENS)
            block_TW = rounded(rows_TW[block])
            sm_TW = np.empty(block_TW.shape, dtype=np.uint8)
            frames.append(planes.deflate(block_TW, bias_W, sm_TW, hidden))
            _pack(sm_TW, packed_TB[block])
        return Frames.of(frames), packed_TB.data.cast("B")

    def arrays(self, exp: Frames, sm: Plane) -> list[pa.Array]:
        """One row of `fields`."""
        return planes.framed_arrays(exp, sm)

    def stored(self, exp: Buffers, sm: Buffers) -> tuple[Frames, memoryview]:
        """The inverse of `arrays`."""
        return planes.framed_parts(exp, sm)

    def decode(
        self,
        exp: Frames,
        sm: Plane,
        n_tokens: int,
        width: int,
        hidden: int,
        params: bytes,
        tokens: slice,
        layers: Sequence[int],
    ) -> Bits:
        """uint16 [tokens, len(layers), H]; only the frames that are asked for are decompressed."""
        planes.require_shape(exp, n_tokens, width, hidden)
        packed = _packed_width(width)
        if len(sm) != n_tokens * packed or len(params) != width:
            raise ValueError(
                f"{len(sm)} packed bytes and {len(params)} of bias for {n_tokens} x {width}"
            )
        bias_W = np.frombuffer(params, dtype=np.uint8)
        packed_TB = np.frombuffer(sm, dtype=np.uint8).reshape(n_tokens, packed)
        wanted = range(*tokens.indices(n_tokens))
        out_TW = pooled((len(wanted), len(layers) * hidden), np.uint16)
        pieces = planes.pieces(n_tokens, hidden, width // hidden, wanted, layers)
        for (low, high), of_block in itertools.groupby(pieces, key=lambda p: (p.low, p.high)):
            sm_TW = _unpack(packed_TB[low:high], width)
            planes.inflate(exp, [*of_block], hidden, sm_TW, low, bias_W, out_TW, wanted.start)
        return out_TW.reshape(len(wanted), len(layers), hidden)


def _packed_width(width: int) -> int:
    return (width + 1) // 2 + (width + 7) // 8


def _pack(sm_TW: Bytes, packed_TB: Bytes) -> None:
    """`sm` bytes, mantissa << 1 | sign with three zeros between, to 5 bits each."""
    half = (sm_TW.shape[1] + 1) // 2
    mantissas = packed_TB[:, :half]
    np.bitwise_and(sm_TW[:, :half], 0xF0, out=mantissas)
    low = sm_TW[:, half:]
    mantissas[:, : low.shape[1]] |= low >> 4
    packed_TB[:, half:] = np.packbits(sm_TW & 1, axis=1)


def _unpack(packed_TB: Bytes, width: int) -> Bytes:
    half = (width + 1) // 2
    sm_TW = np.empty((len(packed_TB), width), dtype=np.uint8)
    np.bitwise_and(packed_TB[:, :half], 0xF0, out=sm_TW[:, :half])
    low = sm_TW[:, half:]
    np.left_shift(packed_TB[:, : low.shape[1]], 4, out=low)
    sm_TW |= np.unpackbits(packed_TB[:, half:], axis=1, count=width)
    return sm_TW


CODEC = Mantissa4Codec()
