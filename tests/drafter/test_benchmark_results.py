"""Parts of a benchmark that run side by side keep each other's results."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

from benchmarks.finetune_results import add_result

ROUNDS = 40


def add_many(path: Path, name: str) -> None:
    for number in range(ROUNDS):
        add_result(path, name, {"number": number, "windows_s": [0.5] * 200})


def test_two_processes_that_write_at_once_lose_nothing_and_no_reader_sees_a_part(
    tmp_path: Path,
) -> None:
    path = tmp_path / "finetune.json"
    add_result(path, "kimi", {"mfu": 0.4})
    context = multiprocessing.get_context("spawn")
    names = ("choose", "trainers")
    writers = [context.Process(target=add_many, args=(path, name)) for name in names]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert json.loads(path.read_text())["kimi"] == {"mfu": 0.4}
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = json.loads(path.read_text())
    assert {n: found[n]["number"] for n in names} == dict.fromkeys(names, ROUNDS - 1)


def test_numbers_stand_in_a_line_and_nothing_else_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "finetune.json"
    result = {
        "seconds": [1, 2.5, None, True, -1e-9], "none": [], "words": ["[\n1,\n2 ]", "b"],
        "runs": [{"speed": [3.0]}, {"speed": [[4], [5]]}],
    }  # fmt: skip
    add_result(path, "ranks", result)
    assert json.loads(path.read_text()) == {"ranks": result}
    assert '"seconds": [ 1, 2.5, null, true, -1e-09 ]' in path.read_text()
