"""What the store's benchmark records is what it measured."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the script itself sees its neighbours."""
    monkeypatch.syspath_prepend(FOLDER)


def imported(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(name)


@pytest.mark.usefixtures("folder")
def test_a_library_that_is_not_there_meets_no_bar() -> None:
    store = imported("store")
    table = {
        "plane": {"ratio": 1.49}, "parquet bss zstd 1": {"ratio": 1.43},
        "blosc2": {"skipped": "not installed"}, "zipnn": {"ratio": 1.6},
    }  # fmt: skip
    bars = store.above_others("x", table)
    assert [*bars.values()] == [True, None, False]
    assert [name.removeprefix("x: ratio above ") for name in bars] == [*table][1:]
    assert not store.judged({}, bars)["passed"]
    assert store.judged({}, {"one": True, "skipped": None}) == {
        "bars": {"one": True, "skipped": None}, "passed": True,
    }  # fmt: skip


@pytest.mark.usefixtures("folder")
def test_what_a_cold_read_takes_from_the_disk_is_counted(tmp_path: Path) -> None:
    reads = imported("store_reads")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    if not _on_a_disk(path):
        pytest.skip("the temporary directory lies on no disk")
    path.read_bytes()
    before = reads.disk_bytes()
    path.read_bytes()
    warm = reads.disk_bytes()
    reads.forget(path)
    path.read_bytes()
    assert (warm - before) < 1 << 20 <= reads.disk_bytes() - warm


def _on_a_disk(path: Path) -> bool:
    return os.major(path.stat().st_dev) != 0
