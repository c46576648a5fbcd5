"""Which candidates stay when several say the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def later_copies(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """True for every element that equals one before it."""
    copies = np.ones(len(keys), dtype=np.bool_)
    copies[np.unique(keys, return_index=True)[1]] = False
    return copies
