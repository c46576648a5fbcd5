"""From a capture's answer to verified rows in memory: wait for the spool file, check it, take it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datagen.capture.spool import (
    SpoolError,
    SpoolFile,
    discard,
    read_spool,
    spool_path,
)
from datagen.errors import CaptureUnproven
from datagen.target.answers import SPOOL_FULL, Capture
from datagen.target.failures import CapacityFailure, RowFailure
from datagen.target.profile import Profile

READ_ASIDE_BYTES = (
    4 << 20
)  # 1 ms of checksum and page faults; for less, a change of threads costs as much
NO_ROOM = tuple(f"OSError({number}," for number in (errno.ENOSPC, errno.EDQUOT))
"""How the note of a failed write begins where the next may succeed, once others are taken."""
FILE_PATIENCE_S = 30.0  # a healthy engine publishes within a second of its answer
WRONG_WIDTH_FIX = (
    "an engine started with --speculative-algorithm EAGLE instead of EAGLE3 returns the final state "
    "alone; start the capture server with EAGLE3 or with the plugin, and the profile's boundaries"
)


async def take_capture(
    capture: Capture,
    input_ids: Sequence[int],
    rid: str,
    profile: Profile,
    *,
    patience_s: float = FILE_PATIENCE_S,
) -> SpoolFile:
    """The verified spool file of `capture`; the caller discards it once its rows are stored.

    Waits at most `patience_s` for it.

    Raises CaptureUnproven when the engine captures something else than the profile says (the run
    must stop), RowFailure when this one file is torn, late or of another request (try again),
    CapacityFailure when the spool has no room.
    """
    require_profile(capture.width, capture.boundaries, capture.final_norm, profile)
    path = capture.path
    if path.name != spool_path(path.parent, rid).name:
        raise RowFailure("capture_malformed", f"{path} is not the spool file of request {rid}")
    spooled = await _published(path, patience_s, capture.n_bytes)
    require_profile(spooled.width, spooled.boundaries, spooled.final_norm, profile)
    if spooled.dtype != profile.capture_dtype:
        raise CaptureUnproven(
            f"the engine captures {spooled.dtype}, the profile says {profile.capture_dtype}",
            where=profile.name,
            fix="correct capture_dtype in the profile, or the server's --dtype",
        )
    if spooled.rid != rid or spooled.input_ids != tuple(input_ids):
        discard(path)
        raise RowFailure(
            "capture_mismatch",
            f"{spooled.n_tokens} rows of request {spooled.rid} for {len(input_ids)} tokens sent",
        )
    return spooled


async def _published(path: Path, patience_s: float, n_bytes: int) -> SpoolFile:
    """Poll for the file (it appears whole, soon after the answer) or for its error note.

    A large one is summed on another thread; it would hold up every other capture.
    """
    note = path.with_name(path.name + ".err")
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + patience_s, 0.002
    was_empty = False
    while True:
        try:
            if n_bytes > READ_ASIDE_BYTES:
                path.stat()  # noqa: ASYNC240 - wakes no thread for what is not there yet
                return await asyncio.to_thread(read_spool, path)
            return read_spool(path)
        except FileNotFoundError:
            pass
        except SpoolError as e:
            discard(path)
            raise RowFailure("capture_torn", str(e)) from e
        try:
            detail = note.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            pass
        else:
            if not detail and not was_empty:  # it may be on its way
                was_empty = True
                await asyncio.sleep(0.05)
                continue
            discard(path)
            if not detail or detail.startswith(NO_ROOM):  # where nothing fits, no note does
                raise CapacityFailure(SPOOL_FULL, detail)
            raise RowFailure("capture_write_failed", detail)
        if loop.time() > deadline:
            raise RowFailure(
                "capture_absent",
                f"{path} did not appear in {patience_s:.0f} s: is the spool on this host?",
            )
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.1)


def require_profile(
    width: int, boundaries: tuple[int, ...], final_norm: str, profile: Profile
) -> None:
    """Raise CaptureUnproven, naming the flag, unless the rows are what the profile describes."""
    if width != profile.row_width:
        raise CaptureUnproven(
            f"the engine captures {width} values a token, not {profile.row_width} "
            f"({len(profile.boundaries)} boundaries and the final state of {profile.hidden_size})",
            where=profile.name,
            fix=WRONG_WIDTH_FIX,
        )
    if boundaries != profile.boundaries:
        raise CaptureUnproven(
            f"the engine captures boundaries {list(boundaries)}, not {list(profile.boundaries)}",
            where=profile.name,
            fix="set DATAGEN_CAPTURE_BOUNDARIES of the server to the profile's boundaries",
        )
    if final_norm != profile.final_norm:
        raise CaptureUnproven(
            f"the final state is {final_norm}-norm, not {profile.final_norm}-norm",
            where=profile.name,
            fix="correct final_norm in the profile",
        )


def rows_of(spooled: SpoolFile) -> NDArray[np.uint16]:
    """The rows as bit patterns, uint16 [n_tokens, (K+1)*H], without a copy."""
    return np.frombuffer(spooled.rows, dtype=np.uint16).reshape(spooled.n_tokens, spooled.width)
