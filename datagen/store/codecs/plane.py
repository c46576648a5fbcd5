"""`plane`: lossless bf16 at the entropy limit. The exponent less its channel's median, through zstd;
sign and mantissa raw, one byte each, so that they can be mapped.

Arithmetic wraps mod 256, so every bit pattern comes back, NaN and infinities included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from datagen.store.arrow_row import Buffers
from datagen.store.codecs import _planes as planes
from datagen.store.codecs._frames import Frames
from datagen.store.codecs._planes import Bits, Plane
from datagen.store.codecs._pool import pooled


class PlaneCodec:
    """Exponent plane compressed, sign and mantissa plane raw.

    `exp`: for each block of 512 tokens, for each group of layers, one zstd frame of uint8
    [block, group*H]. `sm`: uint8 [n, L*H], `mantissa << 1 | sign`. `params`: the bias, uint8 [L*H].
    """

    name = "plane"
    version = 1
    lossless = True
    fields = planes.FRAMED_FIELDS
    ipc_compression = None

    def fit(self, rows_TW: Bits, hidden: int) -> bytes:  # noqa: ARG002
        """The median exponent of every channel."""
        return planes.median_exponents(rows_TW).tobytes()

    def encode(self, rows_TW: Bits, hidden: int, params: bytes) -> tuple[Frames, memoryview]:
        """Frames of exponents, and the raw plane."""
        sm_TW = pooled(rows_TW.shape, np.uint8)
        exp = planes.deflate(rows_TW, np.frombuffer(params, dtype=np.uint8), sm_TW, hidden)
        return exp, sm_TW.data.cast("B")

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
        if len(sm) != n_tokens * width or len(params) != width:
            raise ValueError(
                f"{len(sm)} raw bytes and {len(params)} of bias for {n_tokens} x {width}"
            )
        sm_TW = np.frombuffer(sm, dtype=np.uint8).reshape(n_tokens, width)
        wanted = range(*tokens.indices(n_tokens))
        out_TW = pooled((len(wanted), len(layers) * hidden), np.uint16)
        pieces = [*planes.pieces(n_tokens, hidden, width // hidden, wanted, layers)]
        bias_W = np.frombuffer(params, dtype=np.uint8)
        planes.inflate(exp, pieces, hidden, sm_TW, 0, bias_W, out_TW, wanted.start)
        return out_TW.reshape(len(wanted), len(layers), hidden)


CODEC = PlaneCodec()
