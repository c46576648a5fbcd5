"""From a capture's answer to its rows: small files are read at once, large ones beside the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from datagen.capture.spool import read_spool, spool_path, write_spool
from datagen.capture.writer import SpoolBusy
from datagen.target import capture as capture_module
from datagen.target.answers import capture_of
from datagen.target.capture import rows_of, take_capture
from datagen.target.client import Capture
from datagen.target.failures import CapacityFailure, RowFailure
from datagen.target.profile import Profile, load_profile

IDS = [5, 6, 7]
RID = "one"


@pytest.fixture
def profile() -> Profile:
    return load_profile("smollm2")


@pytest.fixture(params=[0, 1 << 30], ids=["aside", "at once"])
def readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads that read; the limit is moved so that the same file is large or small."""
    threads: list[int] = []

    def reading(path: Path) -> object:
        threads.append(threading.get_ident())
        return read_spool(path)

    monkeypatch.setattr(capture_module, "READ_ASIDE_BYTES", request.param)
    monkeypatch.setattr(capture_module, "read_spool", reading)
    return threads


def written(folder: Path, profile: Profile) -> bytes:
    rows = bytes(i % 251 for i in range(len(IDS) * profile.bytes_per_token))
    write_spool(
        spool_path(folder, RID), rows=[rows], n_tokens=len(IDS), width=profile.row_width, dtype="BF16",
        input_ids=b"".join(i.to_bytes(4, "little") for i in IDS),
        metadata={
            "rid": RID, "boundaries": "2,15,27", "hidden": "576", "final_norm": "post", "server": "test",
        },
    )  # fmt: skip
    return rows


def answer(folder: Path, profile: Profile) -> Capture:
    return Capture(
        spool_path(folder, RID), len(IDS), profile.row_width, 1000, profile.boundaries, "post", "test", 1
    )  # fmt: skip


async def test_a_file_that_appears_after_the_answer_is_waited_for(
    tmp_path: Path, profile: Profile, readers: list[int], request: pytest.FixtureRequest
) -> None:
    taking = asyncio.create_task(take_capture(answer(tmp_path, profile), IDS, RID, profile))
    await asyncio.sleep(0.02)
    assert not taking.done()
    rows = written(tmp_path, profile)
    assert rows_of(await taking).tobytes() == rows
    aside = "aside" in request.node.name
    assert (threading.get_ident() in readers) is not aside


async def test_a_torn_file_and_a_failed_write_say_so(
    tmp_path: Path,
    profile: Profile,
    readers: list[int],
) -> None:
    path = spool_path(tmp_path, RID)
    path.write_bytes(b"no safetensors file")
    with pytest.raises(RowFailure, match="capture_torn"):
        await take_capture(answer(tmp_path, profile), IDS, RID, profile)
    assert not path.exists()
    path.with_name(path.name + ".err").write_text("of another shape")
    with pytest.raises(RowFailure, match="of another shape"):
        await take_capture(answer(tmp_path, profile), IDS, RID, profile)


@pytest.mark.parametrize("note", [repr(OSError(errno.ENOSPC, "No space left on device")), ""])
async def test_a_spool_without_room_is_the_servers_and_charges_no_row(
    tmp_path: Path, profile: Profile, readers: list[int], note: str
) -> None:
    path = spool_path(tmp_path, RID)
    path.with_name(path.name + ".err").write_text(note)  # empty: not even the note had room
    with pytest.raises(CapacityFailure, match="spool_full"):
        await take_capture(answer(tmp_path, profile), IDS, RID, profile)
    assert not os.listdir(tmp_path)


def test_a_capture_that_the_engine_had_no_room_for_charges_no_row() -> None:
    def said(error: str) -> dict[str, Any]:
        return {"meta_info": {"datagen": [{"error": error}]}, "output_ids": [1]}

    busy = f"{SpoolBusy.__name__}: 12 bytes free in the spool /dev/shm/x, 99 to write"
    with pytest.raises(CapacityFailure, match="12 bytes free"):
        capture_of(said(busy))
    with pytest.raises(RowFailure, match="capture_failed"):
        capture_of(said("RowsMissing: 8 rows for 200 tokens"))
