"""Arrow columns straight from buffers: `pa.array` of Python values imports pandas, 50 MB of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


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
    ends = np.fromiter(accumulate(map(len, rows), initial=0), dtype=np.int64, count=len(rows) + 1)
    flat = np.concatenate(rows, dtype=np.int32)
    items = pa.Array.from_buffers(pa.int32(), len(flat), [None, pa.py_buffer(flat)])
    kind = pa.large_list(pa.int32())
    return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(ends)], children=[items])


def _validity(values: Sequence[object]) -> pa.Buffer | None:
    if None not in values:
        return None
    bits = np.packbits([v is not None for v in values], bitorder="little")
    return pa.py_buffer(bits)
