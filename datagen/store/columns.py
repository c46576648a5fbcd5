"""Arrow columns straight from buffers: `pa.array` of Python values imports pandas, 50 MB of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

IDS = pa.large_list(pa.int32())


def text_column(kind: pa.DataType, values: Sequence[str | None]) -> pa.Array:
    """A `string` or `large_string` column. Raises UnicodeEncodeError on lone surrogates."""
    encoded = [b"" if v is None else v.encode() for v in values]
    width = np.int64 if pa.types.is_large_string(kind) else np.int32
    ends = np.fromiter(accumulate(map(len, encoded), initial=0), dtype=width, count=len(values) + 1)
    buffers = [_validity(values), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def number_column(kind: pa.DataType, values: Sequence[int | float | None]) -> pa.Array:
    """A column of a fixed-width number. Raises OverflowError when one does not fit."""
    known = np.array([0 if v is None else v for v in values], dtype=kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [_validity(values), pa.py_buffer(known)])


def id_column(rows: Sequence[NDArray[np.int32]]) -> pa.Array:
    """A `large_list<int32>` column of token ids."""
    flat = np.concatenate(rows, dtype=np.int32)
    return _lists(IDS, _numbers(pa.int32(), flat), [len(r) for r in rows])


def list_of(kind: pa.DataType, values: NDArray[np.generic] | pa.Array) -> pa.Array:
    """A `large_list` column of one row, which holds all of `values`, not copied."""
    if isinstance(values, np.ndarray):
        values = _numbers(kind.value_type, values)
    return _lists(kind, values, [len(values)])


def binary_column(ends: NDArray[np.int64], content: bytes | memoryview) -> pa.Array:
    """A `large_binary` column: value i is the bytes from `ends[i]` to `ends[i+1]`; not copied."""
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers)


def _numbers(kind: pa.DataType, values: NDArray[np.generic]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _lists(kind: pa.DataType, items: pa.Array, sizes: Sequence[int]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(sizes), [None, _ends(sizes)], children=[items])


def _ends(sizes: Sequence[int]) -> pa.Buffer:
    return pa.py_buffer(np.array([*accumulate(sizes, initial=0)], dtype=np.int64))


def _validity(values: Sequence[object]) -> pa.Buffer | None:
    if None not in values:
        return None
    bits = np.packbits([v is not None for v in values], bitorder="little")
    return pa.py_buffer(bits)
