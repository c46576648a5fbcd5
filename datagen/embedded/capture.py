"""Hands captured rows to the spool writer, and says what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datagen.capture.spool import SpoolError
from datagen.capture.writer import MIB, Limits, RowFormat, SpoolBusy
from datagen.capture.writer import SpoolWriter as Writer
from datagen.errors import ConfigError

SELF_TEST = "none: the embedded target keeps the stream itself, there is no engine to prove"
LIMITS = Limits(pending_bytes=512 * MIB, threads=2)


class SpoolWriter:
    """Publishes the engine's captures in bf16: one writer, one row format."""

    def __init__(
        self,
        directory: Path,
        *,
        boundaries: tuple[int, ...],
        hidden: int,
        server: str,
        limits: Limits = LIMITS,
    ) -> None:
        """Raises ConfigError when the directory is open to others."""
        self.directory, self.boundaries = directory, boundaries
        self._format = RowFormat(boundaries, hidden, "post", "BF16", server)
        try:
            self._writer = Writer(directory, limits)
        except SpoolError as e:
            raise ConfigError(
                str(e), where=directory, fix="choose another with --spool-dir, or chmod 700 it"
            ) from e

    def publish(self, rid: str, input_ids: list[int], rows_TW: Tensor) -> dict[str, Any]:
        """Queue one capture; returns what the answer says of it: where it will be, or the error.

        `rows_TW`: boundaries in order, then the final state; stored as bf16. Blocks while too many
        bytes wait.
        """
        bits = rows_TW.to(torch.bfloat16).contiguous().view(torch.uint8)
        ids = torch.tensor(input_ids, dtype=torch.int32).numpy().tobytes()
        try:
            self._writer.hold(bits.numel())
        except SpoolBusy as e:
            return {"error": f"{type(e).__name__}: {e}"}
        try:
            note = self._writer.publish(rid, [bits.numpy().data], len(input_ids), ids, self._format)
        except SpoolBusy as e:
            self._writer.release(bits.numel())
            return {"error": f"{type(e).__name__}: {e}"}
        return {**note, "chunks": 1, "self_test": SELF_TEST}

    def close(self) -> None:
        """Finish what is queued."""
        self._writer.close()
