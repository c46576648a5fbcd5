"""Spare files of a spool: captures that were read, whose memory the next ones are written over.

Finding pages for a large file and giving them back costs more than filling them. So a reader that is done
may leave such a file under one of `SPARES` names, in place of unlinking it, and a writer begins with one
where there is any. In huge pages files cost so little that there is nothing to gain
(benchmarks/spool.py). A writer that takes spares says so in its answer. Standard library alone.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

log = logging.getLogger(__name__)
SPARES = 16
NAME = r"spare-\d\d"
LEAST_BYTES, MOST_BYTES = 4 << 20, 64 << 20
"""Of a file. Smaller ones gain nothing; with larger ones the spares would hold more than 1 GiB."""
HUGE_BYTES = 2 << 20  # what a tmpfs of huge pages states as its block
COMING_S = 1.0
"""So long after a spare was found, all names are tried; else the first alone, which is filled first: every
try that fails hands the interpreter's lock to the engine's other threads."""
_found_at = float("-inf")


def hand_back(path: Path, most: int = SPARES) -> None:
    """Let the next capture be written over this one; unlink it where that gains nothing.

    Rows that are still mapped change from now on. An absent file is fine. `most`: how many may be kept.
    """
    try:
        found = path.stat()
        if LEAST_BYTES <= found.st_size <= MOST_BYTES and found.st_blksize < HUGE_BYTES:
            for spare in _names(path.parent)[:most]:
                if not os.path.lexists(spare):  # should another reader be faster, one file goes
                    os.replace(path, spare)
                    return
        path.unlink()
    except FileNotFoundError:
        return


def take(path: str, n_bytes: int) -> bool:
    """Give a spare the name `path`, for a file of `n_bytes`; False when there is none, or no need."""
    global _found_at
    if not LEAST_BYTES <= n_bytes <= MOST_BYTES:
        return False
    coming = time.monotonic() - _found_at < COMING_S
    for spare in _names(Path(path).parent)[: SPARES if coming else 1]:
        try:
            os.utime(spare)  # else a sweep could take it for one that nobody writes
            os.replace(spare, path)
        except FileNotFoundError:
            continue
        _found_at = time.monotonic()
        return True
    return False


def drop(directory: Path) -> None:
    """Remove all of them."""
    for spare in _names(directory):
        try:
            os.unlink(spare)
        except FileNotFoundError:
            continue
        except OSError as e:
            log.warning("cannot remove the spare %s: %s", spare, e)


def _names(directory: Path) -> list[str]:
    return [f"{directory}/spare-{number:02d}" for number in range(SPARES)]
