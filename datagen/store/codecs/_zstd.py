"""zstd as the codecs need it: Huffman coding and little else.

Of exponents zstd's matcher finds false matches only, which cost a quarter of the time and some of the
size. What switches it off (a long stride) also switches Huffman coding off, unless
`literalCompressionMode` says otherwise. Of the ways to zstd in Python only the cffi backend of
`zstandard`, which is the whole C interface, can say it; and it has the functions' addresses, by which
compiled code (`store/kernels.py`) calls them. Frames are plain zstd: any reader understands them.
"""

from __future__ import annotations

from typing import SupportsInt

from zstandard import ZstdError
from zstandard.backend_cffi import ffi, lib  # type: ignore[attr-defined]

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


def _address(pointer: object) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Deflater:
    """A context that compresses; belongs to one thread. `context`, `function`: addresses.

    `function`: size_t (context, destination, its room, source, its size), as `Inflater`'s.
    """

    function = _address(ffi.addressof(lib, "ZSTD_compress2"))

    def __init__(self) -> None:
        self._context = ffi.gc(lib.ZSTD_createCCtx(), lib.ZSTD_freeCCtx)
        for parameter, value in PARAMETERS.items():
            require(lib.ZSTD_CCtx_setParameter(self._context, parameter, value))
        self.context = _address(self._context)


class Inflater:
    """A context that decompresses; belongs to one thread."""

    function = _address(ffi.addressof(lib, "ZSTD_decompressDCtx"))

    def __init__(self) -> None:
        self._context = ffi.gc(lib.ZSTD_createDCtx(), lib.ZSTD_freeDCtx)
        self.context = _address(self._context)


def require(result: SupportsInt) -> None:
    """Raise ZstdError for what zstd returned, if it is an error."""
    if lib.ZSTD_isError(int(result)):
        raise ZstdError(ffi.string(lib.ZSTD_getErrorName(int(result))).decode())


def largest(n_bytes: int, frames: int) -> int:
    """How many bytes `frames` frames of `n_bytes` of content in all can take at most."""
    # compressBound: 1/256 more, and up to 64 bytes of a small one
    return n_bytes + (n_bytes >> 8) + 512 * frames
