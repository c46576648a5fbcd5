"""Puts the chunks of a prefill together: one capture per request, every row present, or none.

An engine hands a long prompt over in chunks, between which requests of others pass, the request may
be aborted, or retracted and started again. Standard library alone; called from one thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from datagen.capture.spool import SpoolError
from datagen.capture.writer import RowFormat, SpoolWriter

ABANDONED_S = 300.0  # between two chunks of one prompt lie seconds


class RowsMissing(SpoolError):
    """A prefill ended with another number of rows than the request has tokens."""


@dataclass(slots=True)
class _Partial:
    generation: int
    touched: float
    pieces: list[memoryview] = field(default_factory=list)
    n_bytes: int = 0


class Assembler:
    """Collects the rows of requests in flight and publishes each when its last chunk arrives."""

    def __init__(
        self, writer: SpoolWriter, row_format: RowFormat, clock: Callable[[], float]
    ) -> None:
        self._writer, self._format, self._clock = writer, row_format, clock
        self._partials: dict[str, _Partial] = {}

    @property
    def in_flight(self) -> int:
        """Requests of which some chunks are held."""
        return len(self._partials)

    def add(
        self,
        rid: str,
        piece: memoryview,
        *,
        generation: int,
        ended: bool,
        input_ids: Sequence[int],
    ) -> dict[str, Any] | None:
        """Take one chunk's rows (bytes, row-major); on the last one, queue the capture and describe it.

        `generation`: how often the request has been started again; rows of an earlier one are
        dropped. Raises RowsMissing, SpoolBusy; the request's rows are dropped then.
        """
        now = self._clock()
        for old in [r for r, p in self._partials.items() if now - p.touched > ABANDONED_S]:
            self.drop(old)  # aborted between two chunks
        partial = self._partials.get(rid)
        if partial is None or partial.generation != generation:
            self.drop(rid)
            partial = self._partials[rid] = _Partial(generation, now)
        partial.touched = now
        try:
            self._writer.hold(piece.nbytes, own=partial.n_bytes)
            partial.pieces.append(piece)
            partial.n_bytes += piece.nbytes
            if not ended:
                return None
            expected = len(input_ids) * self._format.row_bytes
            if partial.n_bytes != expected:
                raise RowsMissing(
                    f"{partial.n_bytes / self._format.row_bytes:g} rows for {len(input_ids)} tokens: "
                    "a cached prefix (send a new extra_key with every attempt) or a restarted prefill"
                )
            note = self._writer.publish(
                rid, partial.pieces, len(input_ids), array("i", input_ids).tobytes(), self._format
            )
        except SpoolError:
            self.drop(rid)
            raise
        del self._partials[rid]  # the writer releases what it holds
        return {**note, "chunks": len(partial.pieces)}

    def drop(self, rid: str) -> None:
        """Forget what is held of a request that will not end; unknown ones are fine."""
        partial = self._partials.pop(rid, None)
        if partial is not None:
            self._writer.release(partial.n_bytes)
