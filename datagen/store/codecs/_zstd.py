"""zstd as the codecs need it: Huffman coding and little else, out of and into memory that is there.

Of exponents zstd's matcher finds false matches only, which cost a quarter of the time and some of the
size. What switches it off (a long stride) also switches Huffman coding off, unless
`literalCompressionMode` says otherwise. Of the ways to zstd in Python only the cffi backend of
`zstandard`, which is the whole C interface, can say it; nor do the others decompress into given memory.
Frames are plain zstd: any reader understands them.

Every call of `lib` gives the interpreter away and waits for it again, so few are made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from zstandard import ZstdError
from zstandard.backend_cffi import ffi, lib  # type: ignore[attr-defined]

from datagen.store.codecs._pool import copied

Buffer = bytes | memoryview | NDArray[Any]

PARAMETERS = {
    lib.ZSTD_c_compressionLevel: 1,
    lib.ZSTD_c_strategy: lib.ZSTD_fast,
    lib.ZSTD_c_windowLog: 17,  # less would cut blocks, each with a Huffman table of its own
    lib.ZSTD_c_hashLog: 6,
    lib.ZSTD_c_chainLog: 6,
    lib.ZSTD_c_minMatch: 7,
    lib.ZSTD_c_targetLength: 1 << 17,  # the stride: a block
    lib.ZSTD_c_literalCompressionMode: lib.ZSTD_ps_enable,
}


class Deflater:
    """Compresses; belongs to one thread, and leaves the interpreter to the others meanwhile."""

    def __init__(self) -> None:
        self._context = ffi.gc(lib.ZSTD_createCCtx(), lib.ZSTD_freeCCtx)
        for parameter, value in PARAMETERS.items():
            _checked(lib.ZSTD_CCtx_setParameter(self._context, parameter, value))
        self._out, self._longest = np.empty(0, dtype=np.uint8), 0

    def __call__(self, content: Buffer) -> memoryview:
        """One frame, which states the size of its content. `content`: contiguous."""
        source = ffi.from_buffer(content)
        if len(source) > self._longest:
            self._out = np.empty(lib.ZSTD_compressBound(len(source)), dtype=np.uint8)
            self._longest = len(source)
        out = ffi.from_buffer(self._out, require_writable=True)
        size = lib.ZSTD_compress2(self._context, out, len(out), source, len(source))
        if size > len(out):
            _checked(size)
        return copied(self._out[:size])


class Inflater:
    """Decompresses; belongs to one thread, and leaves the interpreter to the others meanwhile."""

    def __init__(self) -> None:
        self._context = ffi.gc(lib.ZSTD_createDCtx(), lib.ZSTD_freeDCtx)

    def __call__(self, frame: bytes | memoryview, out: NDArray[Any]) -> None:
        """Fill `out`, contiguous, with the content of `frame`.

        Raises ZstdError unless it is one sound frame whose content has exactly that size.
        """
        source, into = ffi.from_buffer(frame), ffi.from_buffer(out, require_writable=True)
        stated = lib.ZSTD_getFrameContentSize(source, len(source))
        if stated != len(into):
            raise ZstdError(f"it does not state the {len(into)} bytes expected")
        size = lib.ZSTD_decompressDCtx(self._context, into, len(into), source, len(source))
        if size != len(into):
            raise ZstdError(f"{_checked(size)} bytes, {len(into)} stated")


def _checked(result: int) -> int:
    """What zstd returned, unless it is an error: ZstdError then."""
    if lib.ZSTD_isError(result):
        raise ZstdError(ffi.string(lib.ZSTD_getErrorName(result)).decode())
    return result
