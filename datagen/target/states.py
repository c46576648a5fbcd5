"""The rows of one sample, however a server hands them over: through the spool, or as JSON.

JSON needs no plugin and no shared file system, and moves about 5 million floats a second (a fortieth
of the spool's speed): for small runs. A stock server loses rows of a prompt that is prefilled in chunks
without an error, so chunks must be off, and rows are counted. A stock server that captures boundaries
hands over no final state; a second one, started with --enable-return-hidden-states alone, does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from datagen.capture.spares import hand_back
from datagen.capture.spool import discard
from datagen.errors import CaptureUnproven
from datagen.target.capture import WRONG_WIDTH_FIX, rows_of, take_capture
from datagen.target.client import Capture
from datagen.target.failures import RowFailure
from datagen.target.profile import Profile

Mode = Literal["spool", "json"]


class StatesServer(Protocol):
    """What a source of states answers; `SGLangClient` does."""

    async def capture(self, input_ids: Sequence[int], *, rid: str) -> Capture:
        """Through the spool."""
        ...

    async def capture_states(self, input_ids: Sequence[int], *, rid: str) -> NDArray[np.float32]:
        """As JSON: float32 [rows, width]."""
        ...


@dataclass(slots=True)
class Captured:
    """Verified rows, uint16 bit patterns [n_tokens, (K+1)*H]; `discard` once they are stored."""

    rows: NDArray[np.uint16]
    path: Path | None = None
    spares: bool = False
    """Whether its server writes over what is handed back."""

    def discard(self) -> None:
        """Let go of the rows, and remove the spool file, if there is one.

        The system takes back the pages of a large one meanwhile: 4 ms for 34 MB.
        """
        self.rows = self.rows[:0].copy()
        if self.path is not None:
            discard(self.path)

    def hand_back(self, most: int) -> None:
        """As `discard`, where nobody looks at the rows any more: the server may write over them.

        `most`: files that may be kept for it.
        """
        if self.path is not None and self.spares:
            hand_back(self.path, most)
        self.discard()


async def capture_rows(
    server: StatesServer,
    input_ids: Sequence[int],
    rid: str,
    profile: Profile,
    *,
    mode: Mode = "spool",
    final: StatesServer | None = None,
) -> Captured:
    """Have `server` prefill `input_ids` under a new `rid`. `final`: a second server, see above.

    Raises CaptureUnproven when the engine captures something else than the profile says, and the
    failures of the server; RowFailure when this one capture is unusable.
    """
    if mode == "spool":
        capture = await server.capture(input_ids, rid=rid)
        spooled = await take_capture(capture, input_ids, rid, profile)
        return Captured(rows_of(spooled), capture.path, capture.spares)
    states_TW = await _counted(server, input_ids, rid)
    of_boundaries = len(profile.boundaries) * profile.hidden_size
    if states_TW.shape[1] == of_boundaries and final is not None:
        last_TH = await _counted(final, input_ids, rid)
        states_TW = np.concatenate([states_TW, last_TH], axis=1)
    elif states_TW.shape[1] == of_boundaries != profile.row_width:
        raise CaptureUnproven(
            "the server hands over the boundaries without the final state",
            where=profile.name,
            fix="name a second stock server, started with --enable-return-hidden-states alone, with "
            "--final-endpoint; or install the capture plugin in this one",
        )
    if states_TW.shape[1] != profile.row_width:
        raise CaptureUnproven(
            f"the server hands over {states_TW.shape[1]} values a token, not {profile.row_width}",
            where=profile.name,
            fix=WRONG_WIDTH_FIX,
        )
    return Captured(_bits(states_TW, profile))


async def _counted(server: StatesServer, input_ids: Sequence[int], rid: str) -> NDArray[np.float32]:
    states_TW = await server.capture_states(input_ids, rid=rid)
    if len(states_TW) != len(input_ids):
        raise RowFailure(
            "capture_rows",
            f"{len(states_TW)} rows for {len(input_ids)} tokens: start the server with "
            "--chunked-prefill-size -1",
        )
    return states_TW


def _bits(states_TW: NDArray[np.float32], profile: Profile) -> NDArray[np.uint16]:
    """float32 to the 16-bit pattern it was printed from. Raises CaptureUnproven when it has none."""
    if profile.capture_dtype == "BF16":
        bits_TW = states_TW.view(np.uint32)
        if not (bits_TW & 0xFFFF).any():
            return (bits_TW >> 16).astype(np.uint16)
    elif profile.capture_dtype == "F16":
        half_TW = states_TW.astype(np.float16)
        if (half_TW.astype(np.float32) == states_TW).all():
            return half_TW.view(np.uint16)
    raise CaptureUnproven(
        f"the server's states are no {profile.capture_dtype} values",
        where=profile.name,
        fix="correct capture_dtype in the profile, or the server's --dtype",
    )
