"""What the codecs share: a bf16 as two bytes, blocks and frames of exponents, columns of Arrow.

Of a bf16's 16 bits, sign and mantissa are noise. The exponent, once the scale of its channel is taken
off, sits at the entropy of a Gaussian (about 2.6 bits), and Huffman coding brings it there (`_zstd.py`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from zstandard import ZstdError

from datagen.store.arrow_row import Buffers, present, two_ends
from datagen.store.codecs import _zstd as zstd
from datagen.store.codecs._frames import Frames
from datagen.store.codecs._pool import copied
from datagen.store.columns import binary_column, list_of

Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint16]
Plane = bytes | memoryview

BLOCK_TOKENS = 512
FRAME_BYTES = 4 << 20  # larger frames leave the cache, smaller ones pay for their Huffman tables
FIT_TOKENS = 512
CALL_BYTES = 32 << 20  # of exponents, or a block: scratch space of every thread that encodes
FRAMES = pa.large_list(pa.large_binary())
FRAMED_FIELDS = (
    pa.field("exp", FRAMES, nullable=False),
    pa.field("sm", pa.large_binary(), nullable=False),
)


class _OfThread(threading.local):
    """What is made once a thread: contexts and scratch space cost as much as a small sample."""

    def __init__(self) -> None:
        self.deflater, self.inflater = zstd.Deflater(), zstd.Inflater()
        self._exponents = self._frames = np.empty(0, dtype=np.uint8)

    def exponents(self, size: int) -> Bytes:
        """So many bytes at least, valid until the next call."""
        if len(self._exponents) < size:
            self._exponents = np.empty(size, dtype=np.uint8)
        return self._exponents

    def frames(self, size: int) -> Bytes:
        """So many bytes at least, valid until the next call."""
        if len(self._frames) < size:
            self._frames = np.empty(size, dtype=np.uint8)
        return self._frames


_of_thread = _OfThread()


# -- a bf16 as two bytes ------------------------------------------------------------------------


def median_exponents(rows_TW: Bits) -> Bytes:
    """uint8 [W]: the median exponent of every channel over the first tokens."""
    exponents_TW = ((rows_TW[:FIT_TOKENS] >> 7) & 0xFF).astype(np.uint8)
    middle = len(exponents_TW) // 2
    return np.ascontiguousarray(np.partition(exponents_TW, middle, axis=0)[middle])


# -- frames -------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A wanted part of one frame, and its place in the answer.

    Tokens [first, first+size) are the frame's; of them [low, high) are wanted, of the layers
    [layer, layer+length), which lie from `inner` on in the frame and go to `place` of the answer.
    """

    frame: int
    first: int
    size: int
    low: int
    high: int
    layers_in_frame: int
    inner: int
    layer: int
    place: int
    length: int


@functools.cache
def layer_groups(hidden: int, n_layers: int) -> tuple[tuple[int, int], ...]:
    """Layers whose exponents share a frame: all of a small model, one of a large one."""
    per_frame = max(1, min(n_layers, FRAME_BYTES // (BLOCK_TOKENS * hidden)))
    return tuple((a, min(a + per_frame, n_layers)) for a in range(0, n_layers, per_frame))


def blocks(n_tokens: int) -> range:
    """First tokens of the blocks of a sample."""
    return range(0, n_tokens, BLOCK_TOKENS)


def deflate(rows_TW: Bits, bias_W: Bytes, sm_TW: Bytes, hidden: int) -> Frames:
    """Fill `sm_TW`, and return the frames: zstd of uint8 [block, group*H], by block and group of layers."""
    from datagen.store import kernels

    width, deflater = rows_TW.shape[1], _of_thread.deflater
    if width % hidden or not len(bias_W) == width == sm_TW.shape[1] or len(sm_TW) != len(rows_TW):
        raise ValueError(f"rows {rows_TW.shape} of layers of {hidden}, {len(bias_W)} of bias")
    groups = layer_groups(hidden, width // hidden)
    group = groups[0][1] * hidden
    step = max(1, CALL_BYTES // (BLOCK_TOKENS * width)) * BLOCK_TOKENS
    parts = []
    for at in range(0, len(rows_TW), step):
        rows, sm = rows_TW[at : at + step], sm_TW[at : at + step]
        ends = np.empty(len(blocks(len(rows))) * len(groups) + 1, dtype=np.int64)
        into = _of_thread.frames(zstd.largest(rows.size, len(ends)))
        exponents = _of_thread.exponents(min(len(rows), BLOCK_TOKENS) * group)
        zstd.require(
            kernels.deflate(
                deflater.function, deflater.context, rows, BLOCK_TOKENS, group, bias_W, sm, exponents,
                into, ends,
            )
        )  # fmt: skip
        parts.append(Frames(copied(into[: ends[-1]]), ends))
    return Frames.of(parts)


def require_shape(exp: Frames, n_tokens: int, width: int, hidden: int) -> None:
    """Raise ValueError unless there is a frame for every block and group of layers."""
    if width % hidden:
        raise ValueError(f"{width} values a token of layers of {hidden}")
    expected = len(blocks(n_tokens)) * len(layer_groups(hidden, width // hidden))
    if n_tokens < 1 or exp.count != expected:
        raise ValueError(f"{exp.count} frames, {expected} expected for {n_tokens} tokens")


def pieces(
    n_tokens: int, hidden: int, n_layers: int, tokens: range, layers: Sequence[int]
) -> Iterator[Piece]:
    """The parts of frames that hold `tokens` of `layers`, frame by frame."""
    runs, per_block = _runs(hidden, n_layers, tuple(layers)), len(layer_groups(hidden, n_layers))
    for first in range(tokens.start // BLOCK_TOKENS * BLOCK_TOKENS, tokens.stop, BLOCK_TOKENS):
        frame, size = first // BLOCK_TOKENS * per_block, min(BLOCK_TOKENS, n_tokens - first)
        low, high = max(tokens.start, first), min(tokens.stop, first + size)
        for number, in_frame, inner, layer, place, length in runs:
            yield Piece(
                frame + number, first, size, low, high, in_frame, inner, layer, place, length
            )


@functools.lru_cache(maxsize=256)
def _runs(hidden: int, n_layers: int, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Neighbours among `layers` that are neighbours in a frame, frame by frame.

    (frame in its block, layers in the frame, first of them there, first of all, place in `layers`, length)
    """
    found: list[tuple[int, ...]] = []
    if not all(map(range(n_layers).__contains__, layers)):
        raise ValueError(f"layers {layers} of {n_layers}")
    for number, (a, b) in enumerate(layer_groups(hidden, n_layers)):
        runs: list[tuple[int, int, int]] = []  # place, layer, length
        for place, layer in enumerate(layers):
            if not a <= layer < b:
                continue
            if runs and (place, layer) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((place, layer, 1))
        found += [(number, b - a, layer - a, layer, place, length) for place, layer, length in runs]
    return found


def inflate(
    exp: Frames, pieces: Sequence[Piece], hidden: int, sm_TW: Bytes, sm_first: int, bias_W: Bytes,
    out_TV: Bits, out_first: int,
) -> None:  # fmt: skip
    """Fill what `pieces` name of `out_TV`. `sm_first`, `out_first`: the tokens of the first rows of both.

    Raises ValueError for a frame that is none, or of another size than its piece says.
    """
    from datagen.store import kernels

    if not pieces:
        return
    inflater = _of_thread.inflater
    frame, found = kernels.inflate(
        inflater.function, inflater.context, np.frombuffer(exp.data, dtype=np.uint8), exp.ends,
        np.array(pieces, dtype=np.int64), hidden,
        _of_thread.exponents(max(p.size * p.layers_in_frame for p in pieces) * hidden),
        sm_TW, sm_first, bias_W, out_TV, out_first,
    )  # fmt: skip
    if frame:
        try:
            zstd.require(found)
        except ZstdError as e:
            raise ValueError(f"frame {frame - 1} cannot be decompressed: {e}") from e
        raise ValueError(f"frame {frame - 1} holds {found} bytes, which is not its size")


# -- columns ------------------------------------------------------------------------------------


def framed_arrays(exp: Frames, sm: Plane) -> list[pa.Array]:
    """One row of FRAMED_FIELDS, without a copy."""
    whole = np.array([0, len(sm)], dtype=np.int64)
    return [list_of(FRAMES, binary_column(exp.ends, exp.data)), binary_column(whole, sm)]


def framed_parts(exp: Buffers, sm: Buffers) -> tuple[Frames, memoryview]:
    """The inverse of `framed_arrays`, without a copy. Raises ValueError, struct.error."""
    _, list_ends, _, frame_ends, frames = exp
    _, plane_ends, plane = sm
    first, last = two_ends(list_ends)
    if not 0 <= first <= last:
        raise ValueError(f"frames {first} to {last}")
    stored = present(frame_ends)[8 * first : 8 * (last + 1)]
    if len(stored) != 8 * (last - first + 1):
        raise ValueError(f"{len(stored)} bytes of ends of {last - first} frames")
    ends = np.frombuffer(bytes(stored), dtype=np.int64)  # a copy: what is checked cannot change
    return Frames.checked(present(frames), ends), present(plane)[slice(*two_ends(plane_ends))]
