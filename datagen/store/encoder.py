"""The encode side of a shard, for any thread: rows in, what `PartitionStore.add_states` takes out."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from datagen.store.codecs import Encoded, codec_named
from datagen.store.states import StatesSpec, encode, fit

REFIT_TOKENS = 64  # of each sample: 8 times 64 are as good as all there are


class Encoder:
    """Encodes samples from any thread, all with what the codec learnt from the first.

    With `refit_after` it learns once more, from a few tokens of each of so many samples: one sample is
    a poor picture of a target's channels (0.5 % of the size of SmolLM2's states).
    """

    def __init__(self, spec: StatesSpec, *, refit_after: int = 0) -> None:
        self._spec, self._refit_after = spec, refit_after
        self._gate, self._seen = threading.Lock(), list[NDArray[np.uint16]]()
        self.params: bytes | None = None
        """What the next sample is encoded with."""

    def __call__(self, rows_TW: NDArray[np.uint16]) -> Encoded:
        """One sample, uint16 [n, W]. Raises ValueError on another width."""
        if rows_TW.ndim != 2 or rows_TW.shape[1] != self._spec.width or not len(rows_TW):
            raise ValueError(f"{rows_TW.shape} rows of states of width {self._spec.width}")
        if rows_TW.dtype != np.uint16:
            raise ValueError(f"rows of {rows_TW.dtype}, bit patterns are uint16")
        with self._gate:
            params = self._learnt(rows_TW)
        return encode(self._spec, params, np.ascontiguousarray(rows_TW))

    def again(self, encoded: Encoded, params: bytes) -> Encoded:
        """What was encoded with other parameters than a shard's, with the shard's."""
        spec, (n_tokens, width) = self._spec, encoded.shape
        rows = codec_named(spec.codec).decode(
            encoded.exp, encoded.sm, n_tokens, width, spec.hidden_size, encoded.params,
            slice(None), range(spec.n_layers),
        )  # fmt: skip
        return encode(spec, params, rows.reshape(n_tokens, width))

    def _learnt(self, rows_TW: NDArray[np.uint16]) -> bytes:
        if self.params is None:
            self.params = fit(self._spec, rows_TW)
        if len(self._seen) < self._refit_after:
            places = np.linspace(0, len(rows_TW) - 1, min(REFIT_TOKENS, len(rows_TW)))
            self._seen.append(rows_TW[places.astype(np.int64)])
            if len(self._seen) == self._refit_after:
                self.params = fit(self._spec, np.concatenate(self._seen))
                self._seen = [rows_TW[:0].copy()] * self._refit_after  # nothing of them is needed
        return self.params
