"""`plane`: lossless bf16 at the entropy limit.

Of a bf16's 16 bits, sign and mantissa are noise: stored raw, one byte each. The exponent, once the
scale of its channel is taken off, sits at the entropy of a Gaussian (about 2.6 bits): stored minus
the channel's median through zstd. zstd's matcher only finds false matches in it; these parameters
leave Huffman coding and little else, which is both smaller and faster than any level.
Arithmetic wraps mod 256, so every bit pattern comes back, NaN and infinities included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from datagen.store.threads import compute_threads

BLOCK_TOKENS = 512
FRAME_BYTES = 4 << 20  # larger frames leave the cache, smaller ones pay for their Huffman tables
FIT_TOKENS = 256
CHUNK_VALUES = 1 << 16  # values split or joined at a time: the temporaries stay in the L2 cache
ZSTD = zstandard.ZstdCompressionParameters.from_level(
    1,
    window_log=17,
    hash_log=6,
    chain_log=6,
    min_match=7,
    strategy=zstandard.STRATEGY_FAST,
    target_length=0,
)


def layers_per_frame(hidden: int, n_layers: int) -> int:
    """Layers whose exponents share a frame: all of a small model, one of a large one."""
    return max(1, min(n_layers, FRAME_BYTES // (BLOCK_TOKENS * hidden)))


def _groups(n_layers: int, per_frame: int) -> list[tuple[int, int]]:
    return [(a, min(a + per_frame, n_layers)) for a in range(0, n_layers, per_frame)]


class PlaneCodec:
    """Exponent plane compressed, sign and mantissa plane raw.

    `exp`: for each block of 512 tokens, for each group of layers, one zstd frame of uint8
    [block, group*H]. `sm`: uint8 [n, L*H], `mantissa << 1 | sign`. `params`: the bias, uint8 [L*H].
    """

    name = "plane"
    version = 1
    lossless = True

    def fit(self, rows_TW: NDArray[np.uint16], hidden: int) -> bytes:  # noqa: ARG002
        """The median exponent of every channel over the first tokens."""
        exponents_TW = ((rows_TW[:FIT_TOKENS] >> 7) & 0xFF).astype(np.uint8)
        middle = len(exponents_TW) // 2
        return np.ascontiguousarray(np.partition(exponents_TW, middle, axis=0)[middle]).tobytes()

    def encode(
        self, rows_TW: NDArray[np.uint16], hidden: int, params: bytes
    ) -> tuple[list[bytes], memoryview]:
        """Frames of exponents, and the raw plane."""
        n, width = rows_TW.shape
        bias_W = np.frombuffer(params, dtype=np.uint8)
        groups = _groups(width // hidden, layers_per_frame(hidden, width // hidden))
        sm_TW = np.empty((n, width), dtype=np.uint8)

        def frames_of(start: int) -> list[bytes]:
            block_TW = rows_TW[start : start + BLOCK_TOKENS]
            exponents_TW = np.empty(block_TW.shape, dtype=np.uint8)
            _split(block_TW, bias_W, exponents_TW, sm_TW[start : start + BLOCK_TOKENS])
            compressor = zstandard.ZstdCompressor(compression_params=ZSTD)
            return [
                compressor.compress(
                    np.ascontiguousarray(exponents_TW[:, a * hidden : b * hidden]).data
                )
                for a, b in groups
            ]

        blocks = range(0, n, BLOCK_TOKENS)
        mapped = compute_threads().map(frames_of, blocks) if len(blocks) > 1 else [frames_of(0)]
        return [frame for frames in mapped for frame in frames], sm_TW.data.cast("B")

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
    ) -> NDArray[np.uint16]:
        """uint16 [tokens, len(layers), H]; only the frames that are asked for are decompressed."""
        n_layers = width // hidden
        groups = _groups(n_layers, layers_per_frame(hidden, n_layers))
        n_blocks = -(-n_tokens // BLOCK_TOKENS)
        if len(exp) != n_blocks * len(groups):
            raise ValueError(f"{len(exp)} frames, {n_blocks * len(groups)} expected")
        if len(sm) != n_tokens * width or len(params) != width:
            raise ValueError(
                f"{len(sm)} raw bytes and {len(params)} of bias for {n_tokens} x {width}"
            )
        bias_W = np.frombuffer(params, dtype=np.uint8)
        sm_TW = np.frombuffer(sm, dtype=np.uint8).reshape(n_tokens, width)
        start, stop, _ = tokens.indices(n_tokens)
        count = max(0, stop - start)
        out_TW = np.empty((count, len(layers) * hidden), dtype=np.uint16)
        decompressor = zstandard.ZstdDecompressor()
        for block in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS) if count else 0):
            first = block * BLOCK_TOKENS
            size = min(BLOCK_TOKENS, n_tokens - first)
            low, high = max(start, first), min(stop, first + size)
            for number, (a, b) in enumerate(groups):
                runs = _runs(layers, a, b)
                if not runs:
                    continue
                frame = exp[block * len(groups) + number]
                exponents_TW = _inflate(decompressor, frame, size * (b - a) * hidden).reshape(
                    size, (b - a) * hidden
                )
                for at, layer, length in runs:
                    source = slice(layer * hidden, (layer + length) * hidden)
                    inner = slice((layer - a) * hidden, (layer - a + length) * hidden)
                    _join(
                        exponents_TW[low - first : high - first, inner],
                        sm_TW[low:high, source],
                        bias_W[source],
                        out_TW[low - start : high - start, at * hidden : (at + length) * hidden],
                    )
        return out_TW.reshape(count, len(layers), hidden)


def _runs(layers: Sequence[int], a: int, b: int) -> list[tuple[int, int, int]]:
    """Neighbours among `layers` that are neighbours in the frame of [a, b): (place, layer, length)."""
    runs: list[tuple[int, int, int]] = []
    for place, layer in enumerate(layers):
        if not a <= layer < b:
            continue
        if runs and (place, layer) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((place, layer, 1))
    return runs


def _split(
    rows_TW: NDArray[np.uint16],
    bias_W: NDArray[np.uint8],
    exponents_TW: NDArray[np.uint8],
    sm_TW: NDArray[np.uint8],
) -> None:
    """Fill `exponents_TW` (less the bias) and `sm_TW` from bit patterns."""
    step = max(1, CHUNK_VALUES // rows_TW.shape[1])
    one = np.empty((step, rows_TW.shape[1]), dtype=np.uint16)
    other = np.empty_like(one)
    for at in range(0, len(rows_TW), step):
        chunk = rows_TW[at : at + step]
        a, b = one[: len(chunk)], other[: len(chunk)]
        np.right_shift(chunk, 7, out=a)
        exponents = exponents_TW[at : at + step]
        np.copyto(exponents, a, casting="unsafe")  # the low byte of it: the sign falls off
        np.subtract(exponents, bias_W, out=exponents)
        np.left_shift(chunk, 1, out=a)
        np.right_shift(chunk, 15, out=b)
        np.bitwise_or(a, b, out=a)
        np.copyto(sm_TW[at : at + step], a, casting="unsafe")


def _join(
    exponents_TW: NDArray[np.uint8],
    sm_TW: NDArray[np.uint8],
    bias_W: NDArray[np.uint8],
    out_TW: NDArray[np.uint16],
) -> None:
    """Fill `out_TW` with bit patterns: the inverse of `_split`."""
    step = max(1, CHUNK_VALUES // out_TW.shape[1])
    exponents = np.empty((step, out_TW.shape[1]), dtype=np.uint8)
    rotated = np.empty((step, out_TW.shape[1]), dtype=np.uint16)
    for at in range(0, len(out_TW), step):
        out = out_TW[at : at + step]
        a, e = rotated[: len(out)], exponents[: len(out)]
        np.add(exponents_TW[at : at + step], bias_W, out=e)
        np.copyto(a, e)
        np.left_shift(a, 8, out=a)
        np.bitwise_or(a, sm_TW[at : at + step], out=a)
        np.right_shift(a, 1, out=out)
        np.left_shift(a, 15, out=a)
        np.bitwise_or(out, a, out=out)


def _inflate(
    decompressor: zstandard.ZstdDecompressor, frame: bytes | memoryview, size: int
) -> NDArray[np.uint8]:
    """A frame of exactly `size` bytes; its stated size is checked before anything is allocated."""
    try:
        stated = zstandard.frame_content_size(bytes(frame[:18]))
        if stated != size:
            raise ValueError(f"a frame states {stated} bytes, {size} expected")
        return np.frombuffer(decompressor.decompress(frame, max_output_size=size), dtype=np.uint8)
    except zstandard.ZstdError as e:
        raise ValueError(f"a frame cannot be decompressed: {e}") from e
