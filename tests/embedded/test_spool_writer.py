"""Captures on their way to the spool."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
import torch

from datagen.capture.spool import STALE_S, spool_path
from datagen.embedded.capture import SpoolWriter
from datagen.errors import ConfigError


def writer(directory: Path) -> SpoolWriter:
    return SpoolWriter(directory, boundaries=(1,), hidden=4, server="test 1")


def test_the_directory_is_private_from_the_start(tmp_path: Path) -> None:
    writer(tmp_path / "spool").close()
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        writer(tmp_path / "spool")


def test_a_write_that_fails_leaves_a_note_in_place_of_the_file(tmp_path: Path) -> None:
    spool = writer(tmp_path / "spool")
    path = spool_path(tmp_path / "spool", "r")
    path.mkdir()  # the rename cannot replace a directory
    spool.publish("r", [5, 6], torch.ones(2, 8))
    spool.close()
    assert "Error" in path.with_name(path.name + ".err").read_text()
    assert [p for p in (tmp_path / "spool").iterdir() if p.is_file()] == [
        path.with_name(path.name + ".err")
    ]


def test_what_an_earlier_server_left_is_swept_and_what_is_fresh_stays(tmp_path: Path) -> None:
    spool = writer(tmp_path / "spool")
    for rid in ("old", "fresh"):
        spool.publish(rid, [5], torch.ones(1, 8))
    spool.close()
    old, fresh = (spool_path(tmp_path / "spool", rid) for rid in ("old", "fresh"))
    past = time.time() - STALE_S - 1
    os.utime(old, (past, past))
    writer(tmp_path / "spool").close()
    assert not old.exists()
    assert fresh.exists()
