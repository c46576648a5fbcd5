"""Memory of Arrow's pool, which keeps it: what the system gives afresh must be cleared page by page first,

a third of the time of decoding. And copies into it outside the interpreter's lock: `bytes` and `join`
hold it for a second a GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def pooled(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """An array of that shape, not cleared."""
    count = prod(shape)
    memory = pa.allocate_buffer(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


def joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """A copy of all `parts`, one after the other."""
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]
    return np.concatenate(arrays, out=pooled((sum(map(len, arrays)),), np.uint8)).data


def copied(content: NDArray[np.uint8]) -> memoryview:
    """A copy of `content`."""
    copy = pooled(content.shape, np.uint8)
    np.copyto(copy, content)
    return copy.data
