"""Frames of exponents, one after the other in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datagen.store.codecs._pool import joined


@dataclass(frozen=True, slots=True)
class Frames:
    """Frame i is the bytes of `data` from `ends[i]` to `ends[i+1]`; `ends`: int64 [frames + 1].

    Compiled code reads along `ends` unasked: they never decrease, and stay within `data`.
    """

    data: bytes | memoryview
    ends: NDArray[np.int64]

    @classmethod
    def checked(cls, data: bytes | memoryview, ends: NDArray[np.int64]) -> Frames:
        """Frames of a file. Raises ValueError for ends that are not such."""
        sound = len(ends) > 0 and 0 <= ends[0] <= ends[-1] <= len(data)
        if not sound or (len(ends) > 2 and (ends[1:] < ends[:-1]).any()):
            raise ValueError(f"ends of frames that do not fit {len(data)} bytes")
        return cls(data, ends)

    @classmethod
    def of(cls, parts: Sequence[Frames]) -> Frames:
        """All of `parts`, each of which begins its data; a copy unless it is one."""
        if len(parts) == 1:
            return parts[0]
        begins = np.cumsum([0, *(part.n_bytes for part in parts[:-1])])
        ends = [part.ends[1:] + begin for part, begin in zip(parts, begins, strict=True)]
        return cls(joined([p.data for p in parts]), np.concatenate([[0], *ends]))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.ends) - 1

    @property
    def n_bytes(self) -> int:
        """Of all of them."""
        return int(self.ends[-1] - self.ends[0])
