"""A finished run, read as a trainer does: by id, in parts, from other processes, never on trust."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from datagen.errors import CorruptFile, FingerprintMismatch
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import build_manifest
from datagen.store.plan import Plan, write_plan
from datagen.store.run_reader import MAX_OPEN, RunReader
from tests.store.rows import (
    REJECTED,
    SPEC,
    collect,
    complete_run,
    header,
    ids_of,
    open_store,
    planned,
    prompt_id,
    response,
    states_of,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("read") / "run"
    complete_run(root, partitions=3)
    return root


@pytest.fixture
def run(good: Path) -> RunReader:
    return RunReader.open(good / "manifest.json")


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(good, tmp_path / "run"))


def samples() -> list[tuple[int, int]]:
    """(prompt number, turn) of what complete_run collects, in plan order."""
    return [(n, t) for n in range(12) if n != REJECTED for t in range(2 if n % 4 == 0 else 1)]


def whole(number: int, turn: int) -> NDArray[np.uint16]:
    states = states_of(response(number, turn))
    return states.reshape(len(states), SPEC.n_layers, SPEC.hidden_size)


def test_every_collected_sample_is_found_by_its_id_and_by_its_number(run: RunReader) -> None:
    assert len(run) == len(samples()) == run.manifest.samples.collected
    for number, (prompt, turn) in enumerate(samples()):
        sample_id = f"{prompt_id(prompt)}-{turn}"
        assert run.sample_id(number) == sample_id
        assert run.index.number(sample_id) == number
        assert np.array_equal(run.states(sample_id), whole(prompt, turn))
        columns = run.columns(sample_id)
        answer = response(prompt, turn)
        assert np.array_equal(columns.input_ids, ids_of(answer))
        assert columns.loss_mask.sum() == len(answer.response_ids)
        assert run.index.tokens[number] == columns.n_tokens


def test_what_is_not_collected_is_not_there(run: RunReader) -> None:
    strange = ["", "x", f"{prompt_id(0)}", f"{prompt_id(0)}-7", f"{prompt_id(0).upper()}-0",
               f"{prompt_id(REJECTED)}-0", f"{prompt_id(99)}-0", f"{prompt_id(0)}-65535"]  # fmt: skip
    for sample_id in strange:
        with pytest.raises(KeyError):
            run.states(sample_id)
    for number in (-1, len(run)):
        with pytest.raises(KeyError):
            run.columns(number)


def test_a_run_is_read_in_order_and_by_split(run: RunReader) -> None:
    read = [(c.sample_id, s) for c, s in run.samples()]
    assert [sample_id for sample_id, _ in read] == [f"{prompt_id(p)}-{t}" for p, t in samples()]
    assert all(np.array_equal(s, whole(*at)) for (_, s), at in zip(read, samples(), strict=True))
    train, heldout = run.numbers("train").tolist(), run.numbers("heldout").tolist()
    assert train + heldout == list(range(len(run)))
    assert len(heldout) == run.manifest.splits["heldout"].samples.collected
    assert not len(run.numbers("no such split"))


def test_tokens_and_boundaries_are_chosen(run: RunReader) -> None:
    number, (prompt, turn) = 4, samples()[4]
    full = whole(prompt, turn)
    for wanted, layers in (
        ({"boundaries": [3]}, [1]),
        ({"boundaries": [4, 1]}, [2, 0]),
        ({"boundaries": [], "final": True}, [3]),
        ({"boundaries": [1], "final": True}, [0, 3]),
        ({"final": False}, [0, 1, 2]),
    ):
        asked: Any = wanted
        part = run.states(number, tokens=slice(2, 5), **asked)
        assert np.array_equal(part, full[2:5][:, layers])
    with pytest.raises(ValueError, match=r"boundaries \[2\]"):
        run.states(number, boundaries=[1, 2])


def test_the_raw_plane_is_a_view_of_the_file(run: RunReader) -> None:
    plane, full = run.raw_plane(2), states_of(response(*samples()[2]))
    assert np.array_equal(plane, (full << 1 & 0xFE | full >> 15).astype(np.uint8))
    again = run.raw_plane(2)
    assert plane.__array_interface__["data"] == again.__array_interface__["data"]


def test_token_statistics_are_those_of_the_manifest(run: RunReader) -> None:
    counts = run.token_counts("train")
    stated = {int(k): v for k, v in run.manifest.token_frequencies.items()}
    collected = np.zeros(len(counts), dtype=np.int64)
    for prompt, turn in samples()[: len(run.numbers("train"))]:
        collected += np.bincount(response(prompt, turn).response_ids, minlength=len(counts))
    assert np.array_equal(counts, collected)
    assert stated == {int(i): int(counts[i]) for i in np.flatnonzero(counts)}


def test_the_index_is_small(run: RunReader) -> None:
    assert run.index.n_bytes / len(run) < 100


def _states_in_child(run: RunReader, number: int, pid: int) -> NDArray[np.uint16]:
    assert os.getpid() != pid
    return run.states(number)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_other_processes_read_through_files_of_their_own(run: RunReader, method: str) -> None:
    run.states(0)
    gate = run._open.gate
    with multiprocessing.get_context(method).Pool(2) as pool, gate:  # held while they fork
        work = [(run, n, os.getpid()) for n in range(6)]
        found = pool.starmap_async(_states_in_child, work).get(60)
    assert all(np.array_equal(f, whole(*samples()[n])) for n, f in enumerate(found))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_reader_forked_with_its_shards_open_opens_its_own(run: RunReader) -> None:
    run.states(0)
    before, ours = run._open, os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        ok = np.array_equal(run.states(0), whole(*samples()[0]))
        os.write(write, b"y" if ok and run._open is not before and run._open.pid != ours else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.close(write)
    assert run._open is before


def test_a_pickled_reader_takes_no_open_file_along(run: RunReader) -> None:
    run.states(0)
    copy = pickle.loads(pickle.dumps(run))
    assert not copy._open.shards
    assert np.array_equal(copy.states(3), run.states(3))


def test_few_shards_stay_open(run: RunReader, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run.index.paths) > 2
    monkeypatch.setattr("datagen.store.run_reader.MAX_OPEN", 2)
    for number in range(len(run)):
        run.columns(number)
        assert len(run._open.shards) <= 2
    assert MAX_OPEN > 2


def test_a_run_elsewhere_is_read_through_fsspec(good: Path, run: RunReader) -> None:
    fs = fsspec.filesystem("memory")
    fs.put(str(good), "/bucket/run", recursive=True)
    try:
        remote = RunReader.open("memory://bucket/run/manifest.json")
        assert len(remote) == len(run)
        for number in range(len(run)):
            assert np.array_equal(remote.states(number), run.states(number))
        assert np.array_equal(remote.token_counts(), run.token_counts())
        with pytest.raises(CorruptFile, match="memory://bucket/none"):
            RunReader.open("memory://bucket/none/manifest.json")
    finally:
        fs.rm("/bucket", recursive=True)
    assert len(RunReader.open(f"file://{good}/manifest.json")) == len(run)


# -- never on trust -----------------------------------------------------------------------------


def rewrite(root: Path, change: Any) -> Path:
    path = RunLayout(root).manifest
    stated = orjson.loads(path.read_bytes())
    change(stated)
    path.write_bytes(orjson.dumps(stated))
    return path


@pytest.mark.parametrize(
    "path",
    [
        "../states-000.arrow",
        "/etc/passwd",
        "a/../../b",
        "..",
        "",
        "a\\..\\b",
        "a\0b",
        "partitions/..",
    ],
)
def test_a_path_cannot_leave_the_run(root: Path, path: str) -> None:
    for kind in ("states", "responses"):
        manifest = rewrite(root, lambda m, k=kind: m["splits"]["train"][k][0].update(path=path))
        with pytest.raises(CorruptFile, match="no path inside"):
            RunReader.open(manifest)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["splits"]["train"]["states"][0].update(rows=9), "9 rows stated"),
        (lambda m: m["splits"]["train"]["states"].pop(), "samples in the journals"),
        (lambda m: m["splits"]["train"]["states"].append(m["splits"]["train"]["states"][0]), "twice"),
        (lambda m: m.update(fingerprint="0" * 64), "fingerprint"),
        (lambda m: m["states"].update(hidden_size=17), "its states are"),
        (lambda m: m["states"].update(boundaries=[1, 3]), "its states are"),
        (lambda m: m["states"].update(codec="zip"), "its states are"),
        (lambda m: m["splits"]["train"]["states"][0].update(path="partitions/00000/states-7.arrow"),
         "rows stated"),
        (lambda m: m["splits"]["train"]["states"][0].update(path="partitions/00009/states-000.arrow"),
         "journal"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_the_run_is_refused(
    root: Path, change: Any, named: str
) -> None:
    manifest = rewrite(root, change)
    with pytest.raises((CorruptFile, FingerprintMismatch), match=named):
        RunReader.open(manifest).states(0)


def test_a_shard_in_anothers_place_is_refused_by_sample(root: Path) -> None:
    shards = sorted((root / "partitions" / "00000").glob("states-*.arrow"))
    spare = root / "spare"
    shards[0].rename(spare)
    shards[1].rename(shards[0])
    spare.rename(shards[1])
    run = RunReader.open(root / "manifest.json")
    for read in (run.columns, run.states, run.raw_plane):
        with pytest.raises(CorruptFile, match=r"states-000\.arrow"):
            read(0)


def test_a_shard_that_is_gone_is_named(root: Path) -> None:
    (root / "partitions" / "00000" / "states-000.arrow").unlink()
    run = RunReader.open(root / "manifest.json")
    with pytest.raises(CorruptFile, match=r"states-000\.arrow"):
        run.states(0)


def test_rows_that_were_rejected_after_their_capture_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    layout = RunLayout(root)
    digest = write_plan(layout.plan, [planned(n) for n in range(3)], {})
    Fingerprint({"plan": digest, "target": {}, "settings": {}}).save(layout.fingerprint)
    store = open_store(layout.partition(0).root, digest=Fingerprint.load(layout.fingerprint).digest)
    for number in range(3):
        collect(store, number)
    store.add_rejection(prompt_id(1), 0, "guard", "constant", "all one value", 1)
    store.seal(3)
    store.close()
    manifest = build_manifest(layout, Plan.open(layout.plan), header(layout))
    run = RunReader.open(layout.manifest)
    assert manifest.samples.collected == len(run) == 2
    assert [run.sample_id(n) for n in range(2)] == [f"{prompt_id(n)}-0" for n in (0, 2)]
    assert np.array_equal(run.states(1), whole(2, 0))
    with pytest.raises(KeyError):
        run.states(f"{prompt_id(1)}-0")
