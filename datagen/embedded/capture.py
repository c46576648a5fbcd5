"""Writes captured rows to the spool, off the compute thread, with a bound on what is pending."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datagen.capture.spool import SUFFIX, spool_path, write_spool
from datagen.errors import ConfigError

log = logging.getLogger(__name__)
WRITERS, MAX_PENDING, STALE_S = 2, 16, 900.0


class SpoolWriter:
    """Publishes captures under a directory of the server's choosing, never a client's."""

    def __init__(
        self, directory: Path, *, boundaries: tuple[int, ...], hidden: int, server: str
    ) -> None:
        """Raises ConfigError when the directory is open to others."""
        self.directory, self.boundaries = directory, boundaries
        self._hidden, self._server = hidden, server
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:  # a name others can guess
            raise ConfigError(
                "others can write to the spool directory",
                where=directory,
                fix="choose another with --spool-dir, or chmod 700 your own",
            )
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="spool")
        self._room = threading.BoundedSemaphore(MAX_PENDING)
        self._sweep()

    def publish(self, rid: str, input_ids: list[int], rows_TW: Tensor) -> dict[str, Any]:
        """Queue one capture; returns what the answer says of it. Blocks while too many wait.

        `rows_TW`: boundaries in order, then the final state; stored as bf16.
        """
        path = spool_path(self.directory, rid)
        bits = rows_TW.to(torch.bfloat16).contiguous().view(torch.uint8)
        n_tokens, width = rows_TW.shape
        self._room.acquire()
        self._pool.submit(self._write, path, rid, input_ids, bits, n_tokens, width)
        return {
            "path": str(path),
            "bytes": bits.numel() + 4 * n_tokens,
            "rows": n_tokens,
            "width": width,
            "hidden": self._hidden,
            "boundaries": list(self.boundaries),
            "final_norm": "post",
            "dtype": "BF16",
            "server": self._server,
        }

    def close(self) -> None:
        """Finish what is queued."""
        self._pool.shutdown()

    def _write(
        self, path: Path, rid: str, input_ids: list[int], bits: Tensor, n_tokens: int, width: int
    ) -> None:
        try:
            write_spool(
                path,
                rows=[bits.numpy().data],
                n_tokens=n_tokens,
                width=width,
                dtype="BF16",
                input_ids=torch.tensor(input_ids, dtype=torch.int32).numpy().tobytes(),
                metadata={
                    "rid": rid,
                    "boundaries": ",".join(map(str, self.boundaries)),
                    "hidden": str(self._hidden),
                    "final_norm": "post",
                    "server": self._server,
                },
            )
        except (OSError, ValueError) as e:
            log.error("cannot write capture %s: %s", path, e)
            try:
                path.with_name(path.name + ".err").write_text(repr(e), encoding="utf-8")
            except OSError as worse:  # the client times out on the file instead
                log.error("nor its error note: %s", worse)
        finally:
            self._room.release()

    def _sweep(self) -> None:
        """Remove what clients of an earlier server left behind."""
        for entry in os.scandir(self.directory):
            if SUFFIX in entry.name and entry.stat().st_mtime < time.time() - STALE_S:
                Path(entry.path).unlink(missing_ok=True)
