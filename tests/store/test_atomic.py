from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from datagen.errors import RunLocked, StorageFull
from datagen.store.atomic import make_directory, storage_errors, write_atomic, write_json_atomic
from datagen.store.layout import PartitionLayout, RunLayout, part
from datagen.store.lock import RunLock


def test_a_write_replaces_the_whole_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json_atomic(path, {"a": 1})
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_leaves_the_old_content_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, b"old")
    (tmp_path / "file.json.tmp").symlink_to("/dev/full")
    with pytest.raises(StorageFull, match=r"file\.json.*free space"):
        write_atomic(path, b"x" * 100_000)
    assert path.read_bytes() == b"old"
    assert not (tmp_path / "file.json.tmp").is_symlink()


def test_errors_other_than_a_full_disk_pass_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), storage_errors(tmp_path):
        raise PermissionError(13, "no")


def test_directories_are_made_with_their_parents_and_may_exist(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_the_layout_finds_sealed_and_open_files_by_number(tmp_path: Path) -> None:
    layout = PartitionLayout(tmp_path)
    layout.states(0).touch()
    part(layout.states(1)).touch()
    layout.states(1000).touch()
    layout.responses(2).touch()
    (tmp_path / "states-003.arrow.recovered.part").touch()
    assert layout.numbers("states") == [0, 1, 1000]
    assert layout.numbers("responses") == [2]
    assert RunLayout(tmp_path).partition(7).numbers("states") == []


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with RunLock(path), pytest.raises(RunLocked, match=f"pid {os.getpid()} on "), RunLock(path):
        pass
    with RunLock(path):
        pass


def test_a_killed_writer_leaves_no_lock_behind(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    code = f"""
        import pathlib, time
        from datagen.store.lock import RunLock
        with RunLock(pathlib.Path({str(path)!r})):
            print("held", flush=True)
            time.sleep(60)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunLocked, match=f"pid {holder.pid}"), RunLock(path):
            pass
        holder.kill()
    with RunLock(path):
        assert path.read_text().startswith(f"pid {os.getpid()} ")
