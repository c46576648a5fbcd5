"""The loops that touch every value of a sample, compiled by Numba when this is imported.

A sample is one call or a few, each outside the interpreter's lock from begin to end: threads that must
ask for the lock at every step spend more time waiting for it than working. So zstd's functions are
called from here, by their address. Slow to import (0.7 s; 3 s where nothing is kept yet, or can be):
import it in the function that calls it. Arrays are C-contiguous; every argument's type is checked, and
nothing else is: places and shapes are the caller's to get right. Compiled code is kept beside this
file or in the user's cache (`$NUMBA_CACHE_DIR`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from datagen.errors import ConfigError

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])
Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint16]
Places = NDArray[np.int64]
Sums = NDArray[np.float64]
LANES = 16  # sums that are kept apart, so that none waits for the one before it

WORD, PLACE = types.uintp, types.int64
BYTES_IN = types.Array(types.uint8, 2, "C", readonly=True)
BYTES_OUT = types.Array(types.uint8, 2, "C")
FLAT_IN = types.Array(types.uint8, 1, "C", readonly=True)
FLAT_OUT = types.Array(types.uint8, 1, "C")
BITS_IN = types.Array(types.uint16, 2, "C", readonly=True)
BITS_OUT = types.Array(types.uint16, 2, "C")
LAYERS_IN = types.Array(types.uint16, 3, "C", readonly=True)
SUMS_OUT = types.Array(types.float64, 2, "C")
PLACES_IN = types.Array(types.int64, 1, "C", readonly=True)
PLACES_OUT = types.Array(types.int64, 1, "C")
PIECES_IN = types.Array(types.int64, 2, "C", readonly=True)


if numba.config.DISABLE_JIT:
    raise ConfigError(
        "NUMBA_DISABLE_JIT is set, and states are encoded by compiled code", fix="unset it"
    )
HOMELESS = os.path.expanduser("~") == "~"  # a uid without a name: Numba would make a directory "~"


def compiled(returned: types.Type, *arguments: types.Type) -> Callable[[Function], Function]:
    """Compile a function of these types."""

    def of(function: Function) -> Function:
        made: Function
        try:
            if not HOMELESS or numba.config.CACHE_DIR:
                made = numba.njit(returned(*arguments), nogil=True, cache=True)(function)
                return made
        except Exception as e:  # noqa: BLE001 - what is kept is damaged, another's, or cannot be kept
            log.info("compiled anew, nothing is kept of %s: %s", function.__name__, e)
        made = numba.njit(returned(*arguments), nogil=True)(function)
        return made

    return of


@intrinsic  # type: ignore[untyped-decorator]
def called(_: Any, address: Any, context: Any, into: Any, room: Any, source: Any, size: Any) -> Any:
    """What the C function at `address` returns: size_t (context, into, room, source, size)."""
    word = ir.IntType(types.uintp.bitwidth)

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        kind = ir.FunctionType(word, [word] * 5)
        return builder.call(builder.inttoptr(given[0], ir.PointerType(kind)), given[1:])

    return WORD(address, context, into, room, source, size), generate


@compiled(types.void, BITS_IN, PLACE, PLACE, PLACE, PLACE, FLAT_IN, FLAT_OUT, BYTES_OUT)
def split(
    rows_TW: Bits, low: int, high: int, first: int, last: int,
    bias_W: Bytes, exponents_N: Bytes, sm_TW: Bytes,
) -> None:  # fmt: skip
    """Take the bf16 of tokens [low, high) and columns [first, last) apart.

    Their exponents, less the bias mod 256, go to the begin of `exponents_N`, row by row; mantissa << 1 |
    sign to their own places in `sm_TW`.
    """
    width, bias = last - first, bias_W[first:last]
    for t in range(low, high):
        row, sm = rows_TW[t, first:last], sm_TW[t, first:last]
        exponents = exponents_N[(t - low) * width : (t - low + 1) * width]
        for c in range(width):  # slices, because an index that might be negative is no vector's
            bits = row[c]
            exponents[c] = np.uint8(bits >> 7) - bias[c]  # the sign falls off
            sm[c] = np.uint8(bits << 1) | np.uint8(bits >> 15)


@compiled(
    WORD, WORD, WORD, BITS_IN, PLACE, PLACE, FLAT_IN, BYTES_OUT, FLAT_OUT, FLAT_OUT, PLACES_OUT
)
def deflate(
    function: int, context: int, rows_TW: Bits, block: int, group: int, bias_W: Bytes,
    sm_TW: Bytes, exponents_N: Bytes, into_N: Bytes, ends_F: Places,
) -> np.uintp:  # fmt: skip
    """`split` and compress a frame for every `block` of tokens and, within, every `group` of columns.

    The frames go to `into_N`, one after the other; `ends_F`, [frames + 1], tells where each ends.
    `exponents_N` has room for one. Returns 0, or what zstd returned that is an error.
    """
    n, width = rows_TW.shape
    at, frame = np.int64(0), 0
    ends_F[0] = 0
    for low in range(0, n, block):
        high = min(n, low + block)
        for first in range(0, width, group):
            last = min(width, first + group)
            split(rows_TW, low, high, first, last, bias_W, exponents_N, sm_TW)
            room = np.uintp(into_N.size - at)
            size: np.uintp = called(
                function, context, np.uintp(into_N.ctypes.data + at), room,
                np.uintp(exponents_N.ctypes.data), np.uintp((high - low) * (last - first)),
            )  # fmt: skip
            if size > room:
                return size
            at += np.int64(size)
            frame += 1
            ends_F[frame] = at
    return np.uintp(0)


@compiled(
    types.void, FLAT_IN, PLACE, PLACE, PLACE, PLACE, BYTES_IN, PLACE, PLACE, FLAT_IN,
    BITS_OUT, PLACE, PLACE,
)  # fmt: skip
def join(
    exponents_N: Bytes, begin: int, stride: int, low: int, high: int, sm_TW: Bytes, sm_first: int,
    source: int, bias_W: Bytes, out_TV: Bits, place: int, width: int,
) -> None:  # fmt: skip
    """Put `width` columns of the rows [low, high) of `out_TV` together, the inverse of `split`.

    Row by row they begin at `begin` of the exponents, `stride` further each; in the rows from `sm_first`
    on of `sm_TW` at `source`, as in the bias; at `place` of the rows of `out_TV`.
    """
    bias = bias_W[source : source + width]
    for t in range(low, high):
        at, s = begin + (t - low) * stride, sm_first + t - low
        exponents = exponents_N[at : at + width]
        sm, out = sm_TW[s, source : source + width], out_TV[t, place : place + width]
        for c in range(width):
            bits = np.uint16(np.uint8(exponents[c] + bias[c])) << np.uint16(7)
            sign = np.uint16(sm[c]) << np.uint16(15)
            out[c] = bits | np.uint16(sm[c] >> np.uint8(1)) | sign


@compiled(
    types.UniTuple(WORD, 2), WORD, WORD, FLAT_IN, PLACES_IN, PIECES_IN, PLACE, FLAT_OUT,
    BYTES_IN, PLACE, FLAT_IN, BITS_OUT, PLACE,
)  # fmt: skip
def inflate(
    function: int, context: int, data_N: Bytes, ends_F: Places, pieces: Places, hidden: int,
    exponents_N: Bytes, sm_TW: Bytes, sm_first: int, bias_W: Bytes, out_TV: Bits, out_first: int,
) -> tuple[np.uintp, np.uintp]:  # fmt: skip
    """Decompress the frames of `pieces` (rows of `_planes.Piece`, in their order) and `join` them.

    `sm_first`, `out_first`: the token of the first row of `sm_TW`, of `out_TV`. Returns 0, 0; or the
    number of a frame, from 1 on, and what zstd returned for it instead of the size of its content.
    """
    open_frame = -1
    for p in range(len(pieces)):
        frame, first, size, low, high = pieces[p, :5]
        in_frame, inner, layer, place, length = pieces[p, 5:]
        if frame != open_frame:
            expected = np.uintp(size * in_frame * hidden)
            found: np.uintp = called(
                function, context, np.uintp(exponents_N.ctypes.data), expected,
                np.uintp(data_N.ctypes.data + ends_F[frame]), np.uintp(ends_F[frame + 1] - ends_F[frame]),
            )  # fmt: skip
            if found != expected:
                return np.uintp(frame + 1), found
            open_frame = frame
        stride = in_frame * hidden
        join(
            exponents_N, (low - first) * stride + inner * hidden, stride,
            low - out_first, high - out_first, sm_TW, low - sm_first, layer * hidden, bias_W,
            out_TV, place * hidden, length * hidden,
        )  # fmt: skip
    return np.uintp(0), np.uintp(0)


@compiled(types.void, LAYERS_IN, BITS_OUT, BITS_OUT)
def extremes(bits_TLH: Bits, highest_TL: Bits, lowest_TL: Bits) -> None:
    """Largest and smallest magnitude of every row, as bit patterns without their sign."""
    n, n_layers, hidden = bits_TLH.shape
    magnitude = np.uint16(0x7FFF)
    for t in range(n):
        for layer in range(n_layers):
            row = bits_TLH[t, layer]
            high, low = np.uint16(0), magnitude
            for c in range(hidden):
                bits = row[c] & magnitude
                high = bits if bits > high else high
                low = bits if bits < low else low
            highest_TL[t, layer] = high
            lowest_TL[t, layer] = low


@compiled(types.void, LAYERS_IN, SUMS_OUT)
def squares(bits_TLH: Bits, sums_TL: Sums) -> None:
    """The sum of the squares of every row of bf16."""
    n, n_layers, hidden = bits_TLH.shape
    whole = hidden - hidden % LANES
    sums, words = np.empty(LANES, np.float64), np.empty(LANES, np.uint32)
    values = words.view(np.float32)
    for t in range(n):
        for layer in range(n_layers):
            row = bits_TLH[t, layer]
            sums[:] = 0
            for first in range(0, whole, LANES):
                piece = row[first : first + LANES]
                for i in range(LANES):
                    words[i] = np.uint32(piece[i]) << np.uint32(16)
                for i in range(LANES):
                    sums[i] += np.float64(values[i]) * np.float64(values[i])
            for c in range(whole, hidden):
                words[0] = np.uint32(row[c]) << np.uint32(16)
                sums[0] += np.float64(values[0]) * np.float64(values[0])
            sums_TL[t, layer] = sums.sum()
