"""The loops that touch every value of a sample, compiled by Numba when they are first needed.

One pass each, and outside the interpreter's lock from begin to end, so that threads do not queue for
it. Slow to import (0.3 s): import it in the function that calls it. Arrays are C-contiguous; every
argument is checked against the signature, and nothing else is: places and shapes are the caller's to
get right. Compiled code is kept beside this file or in the user's cache (`$NUMBA_CACHE_DIR`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint16]

PLACE = types.int64
BYTES_IN = types.Array(types.uint8, 2, "C", readonly=True)
BYTES_OUT = types.Array(types.uint8, 2, "C")
BIAS = types.Array(types.uint8, 1, "C", readonly=True)
BITS_IN = types.Array(types.uint16, 2, "C", readonly=True)
BITS_OUT = types.Array(types.uint16, 2, "C")
LAYERS_IN = types.Array(types.uint16, 3, "C", readonly=True)


def compiled(*signature: types.Type) -> Callable[[Function], Function]:
    """Compile a function of arrays that returns nothing."""

    def of(function: Function) -> Function:
        made: Function
        try:
            made = numba.njit(types.void(*signature), nogil=True, cache=True)(function)
        except RuntimeError:  # no place to keep it can be written to
            made = numba.njit(types.void(*signature), nogil=True)(function)
        return made

    return of


@compiled(BITS_IN, PLACE, BIAS, BYTES_OUT, BYTES_OUT)
def split(rows_TW: Bits, first: int, bias_W: Bytes, exponents_TG: Bytes, sm_TW: Bytes) -> None:
    """Take the bf16 of the columns from `first` on, G of them, apart.

    Fills all of `exponents_TG`, less the bias mod 256, and these columns of `sm_TW` (mantissa << 1 |
    sign).
    """
    n, width = exponents_TG.shape
    bias_G = bias_W[first : first + width]
    for t in range(n):
        row, sm = rows_TW[t, first : first + width], sm_TW[t, first : first + width]
        exponents = exponents_TG[t]
        for c in range(width):  # slices, because an index that might be negative is no vector's
            bits = row[c]
            exponents[c] = np.uint8(bits >> 7) - bias_G[c]  # the sign falls off
            sm[c] = np.uint8(bits << 1) | np.uint8(bits >> 15)


@compiled(BYTES_IN, PLACE, BYTES_IN, PLACE, BIAS, BITS_OUT, PLACE, PLACE)
def join(
    exponents_TF: Bytes, inner: int, sm_TW: Bytes, source: int, bias_W: Bytes,
    out_TV: Bits, place: int, width: int,
) -> None:  # fmt: skip
    """Put `width` columns together again, the inverse of `split`.

    They begin at `inner` of the exponents, at `source` of `sm_TW` and the bias, at `place` of `out_TV`.
    """
    bias = bias_W[source : source + width]
    for t in range(len(out_TV)):
        exponents = exponents_TF[t, inner : inner + width]
        sm, out = sm_TW[t, source : source + width], out_TV[t, place : place + width]
        for c in range(width):
            high = np.uint16(np.uint8(exponents[c] + bias[c])) << np.uint16(7)
            sign = np.uint16(sm[c]) << np.uint16(15)
            out[c] = high | np.uint16(sm[c] >> np.uint8(1)) | sign


@compiled(LAYERS_IN, BITS_OUT, BITS_OUT)
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
