"""What no codec of the store can pass: the entropy of the states, and the speed of the CPU it runs on."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
from numpy.typing import NDArray
from store_codecs import cpu_s
from zstandard.backend_cffi import ffi, lib

from datagen.store import kernels
from datagen.store.codecs import _planes, _zstd

ROUNDS = 5


def limit_bits(rows: NDArray[np.uint16], hidden: int) -> dict[str, float]:
    """H(exponent | channel), H(sign | channel), H(mantissa | exponent, layer): bits a value."""
    exponent = sign = mantissa = 0.0
    width = rows.shape[1]
    for column in range(width):
        exponents = (rows[:, column] >> 7 & 0xFF).astype(np.int64)
        exponent += _entropy(np.bincount(exponents)) / width
        sign += _entropy(np.bincount(rows[:, column] >> 15)) / width
    n_layers = width // hidden
    for layer in range(n_layers):
        values = rows[:, layer * hidden : (layer + 1) * hidden].reshape(-1)
        counts = np.bincount(values & 0x7FFF, minlength=32768).reshape(256, 128)
        share = counts.sum(1) / counts.sum()
        mantissa += sum(p * _entropy(c) for p, c in zip(share, counts, strict=True)) / n_layers
    return {"exponent": exponent, "sign": sign, "mantissa": float(mantissa)}


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits a symbol, with Miller and Madow's correction for the symbols not seen often."""
    seen = counts[counts > 0]
    if not len(seen):
        return 0.0
    p = seen / seen.sum()
    return float(-(p * np.log2(p)).sum() + (len(seen) - 1) / (2 * seen.sum() * np.log(2)))


class Huffman:
    """zstd with the codec's settings, frame by frame; belongs to one thread."""

    def __init__(self) -> None:
        self._deflater, self._inflater = _zstd.Deflater(), _zstd.Inflater()
        self._out = np.empty(0, dtype=np.uint8)

    def deflate(self, content: NDArray[np.uint8]) -> bytes:
        """One frame."""
        if len(self._out) < (room := _zstd.largest(content.size, 1)):
            self._out = np.empty(room, dtype=np.uint8)
        context, out = ffi.cast("ZSTD_CCtx *", self._deflater.context), ffi.from_buffer(self._out)
        size = lib.ZSTD_compress2(context, out, len(out), ffi.from_buffer(content), content.size)
        _zstd.require(size)
        return self._out[:size].tobytes()

    def inflate(self, frame: bytes, into: NDArray[np.uint8]) -> None:
        """Fill `into`."""
        context, out = ffi.cast("ZSTD_DCtx *", self._inflater.context), ffi.from_buffer(into)
        _zstd.require(lib.ZSTD_decompressDCtx(context, out, len(out), frame, len(frame)))


def with_mantissa_bits(rows: list[NDArray[np.uint16]], hidden: int) -> dict[str, dict[str, float]]:
    """What would be gained by the last bits of mantissas in the symbols of their exponents, frames of one
    layer each: of the limit, and the MB/s of Huffman coding. What it would also need is left out: packing
    the other bits of a value, and a way for exponents that then have no room (`without_room`).
    """
    zstd = Huffman()
    bias = _planes.median_exponents(np.concatenate([r[:: max(1, len(r) // 64)] for r in rows[:8]]))
    limit, values = (
        sum(limit_bits(np.concatenate(rows), hidden).values()),
        sum(r.size for r in rows),
    )
    found = {}
    for bits in (0, 1, 2, 3):
        size, outside, spent = 0, 0, [0.0, 0.0]
        half = 1 << (7 - bits)
        for each in rows:
            exponents = (each >> 7).astype(np.uint8) - bias
            signed = exponents.view(np.int8)
            outside += int(((signed >= half) | (signed < -half)).sum())
            symbols = (exponents << bits) | (each & ((1 << bits) - 1)).astype(np.uint8)
            for first in range(0, each.shape[1], hidden):
                plane = np.ascontiguousarray(symbols[:, first : first + hidden])
                seconds, frame = cpu_s(lambda p=plane: zstd.deflate(p))
                spent[0] += seconds
                spent[1] += cpu_s(lambda f=frame, p=plane: zstd.inflate(f, p))[0]
                size += len(frame)
        found[str(bits)] = {
            "of_the_limit": round(limit / (8 * size / values + 8 - bits), 4),
            "without_room": round(outside / values, 6),
            "huffman_encode": round(2 * values / spent[0] / 1e6),
            "huffman_decode": round(2 * values / spent[1] / 1e6),
        }
    return found


def physical_speeds(rows: list[NDArray[np.uint16]]) -> dict[str, int]:
    """What this CPU gives, MB of raw states per CPU second: copying them, and zstd's Huffman coding of
    their exponents alone. Bars in MB/s presuppose a CPU; these say which this is."""
    zstd = Huffman()
    raw, copied = sum(r.nbytes for r in rows), np.empty_like(max(rows, key=len))
    bias = _planes.median_exponents(np.concatenate(rows)[::16])
    planes = [np.empty(r.shape, dtype=np.uint8) for r in rows]
    for each, exponents in zip(rows, planes, strict=True):
        n, width = each.shape
        sm = np.empty_like(exponents)
        kernels.split(each, 0, n, 0, width, bias, exponents.reshape(-1), sm)
    frames = [zstd.deflate(p) for p in planes]
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: [np.copyto(copied[: len(r)], r) for r in rows],
        "huffman encode": lambda: [zstd.deflate(p) for p in planes],
        "huffman decode": lambda: [zstd.inflate(f, p) for f, p in zip(frames, planes, strict=True)],
    }
    return {
        name: round(raw / median(cpu_s(work)[0] for _ in range(ROUNDS)) / 1e6)
        for name, work in works.items()
    }
