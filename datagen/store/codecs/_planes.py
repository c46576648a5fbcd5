"""What the codecs share: a bf16 as two bytes, blocks and frames of exponents, columns of Arrow.

Of a bf16's 16 bits, sign and mantissa are noise. The exponent, once the scale of its channel is taken
off, sits at the entropy of a Gaussian (about 2.6 bits), and Huffman coding brings it there (`_zstd.py`).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from zstandard import ZstdError

from datagen.store.arrow_row import Buffers, present, two_ends
from datagen.store.codecs import _zstd as zstd
from datagen.store.codecs._pool import joined
from datagen.store.columns import binary_column, list_of

Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint16]
Frame = bytes | memoryview

BLOCK_TOKENS = 512
FRAME_BYTES = 4 << 20  # larger frames leave the cache, smaller ones pay for their Huffman tables
FIT_TOKENS = 512
FRAMES = pa.large_list(pa.large_binary())
FRAMED_FIELDS = (
    pa.field("exp", FRAMES, nullable=False),
    pa.field("sm", pa.large_binary(), nullable=False),
)


class _OfThread(threading.local):
    """What is made once a thread: contexts and scratch space cost as much as a small sample."""

    def __init__(self) -> None:
        self.deflate, self.inflate = zstd.Deflater(), zstd.Inflater()
        self._exponents = np.empty(0, dtype=np.uint8)

    def exponents(self, rows: int, width: int) -> Bytes:
        """An array uint8 [rows, width], valid until the next call."""
        if len(self._exponents) < rows * width:
            self._exponents = np.empty(rows * width, dtype=np.uint8)
        return self._exponents[: rows * width].reshape(rows, width)


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


def deflate(rows_TW: Bits, bias_W: Bytes, sm_TW: Bytes, hidden: int) -> list[memoryview]:
    """Fill `sm_TW`, and return the frames of one block: zstd of uint8 [block, group*H] by group."""
    from datagen.store import kernels

    frames = []
    for a, b in layer_groups(hidden, rows_TW.shape[1] // hidden):
        exponents = _of_thread.exponents(len(rows_TW), (b - a) * hidden)
        kernels.split(rows_TW, a * hidden, bias_W, exponents, sm_TW)
        frames.append(_of_thread.deflate(exponents))
    return frames


def require_shape(exp: Sequence[Frame], n_tokens: int, width: int, hidden: int) -> None:
    """Raise ValueError unless there is a frame for every block and group of layers."""
    expected = len(blocks(n_tokens)) * len(layer_groups(hidden, width // hidden))
    if n_tokens < 1 or len(exp) != expected:
        raise ValueError(f"{len(exp)} frames, {expected} expected for {n_tokens} tokens")


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


class Inflater:
    """Frames of one sample, decompressed as they are asked for; the last one is kept.

    One at a time on a thread: they share its scratch space.
    """

    def __init__(self, exp: Sequence[Frame], hidden: int) -> None:
        self._exp, self._hidden = exp, hidden
        self._last: tuple[int, Bytes] | None = None

    def exponents(self, piece: Piece) -> Bytes:
        """uint8 [high-low, layers_in_frame*H]: the rows of a piece, still less the bias.

        Valid until the next call. Raises ValueError.
        """
        if self._last is None or self._last[0] != piece.frame:
            whole = _of_thread.exponents(piece.size, piece.layers_in_frame * self._hidden)
            try:
                _of_thread.inflate(self._exp[piece.frame], whole)
            except ZstdError as e:
                raise ValueError(f"a frame cannot be decompressed: {e}") from e
            self._last = (piece.frame, whole)
        return self._last[1][piece.low - piece.first : piece.high - piece.first]


# -- columns ------------------------------------------------------------------------------------


def framed_arrays(exp: Sequence[Frame], sm: Frame) -> list[pa.Array]:
    """One row of FRAMED_FIELDS; neither the plane nor a single frame is copied."""
    whole = exp[0] if len(exp) == 1 else joined(exp)
    frames = binary_column([len(frame) for frame in exp], whole)
    return [list_of(FRAMES, frames), binary_column([len(sm)], sm)]


def framed_parts(exp: Buffers, sm: Buffers) -> tuple[list[memoryview], memoryview]:
    """The inverse of `framed_arrays`, without a copy. Raises ValueError, struct.error."""
    _, list_ends, _, frame_ends, frames = exp
    _, plane_ends, plane = sm
    first, last = two_ends(list_ends)
    if not 0 <= first <= last:
        raise ValueError(f"frames {first} to {last}")
    stored = present(frame_ends)[8 * first : 8 * (last + 1)]
    if len(stored) != 8 * (last - first + 1):
        raise ValueError(f"{len(stored)} bytes of ends of {last - first} frames")
    ends = stored.cast("q").tolist()
    return (
        [present(frames)[a:b] for a, b in itertools.pairwise(ends)],
        present(plane)[slice(*two_ends(plane_ends))],
    )
