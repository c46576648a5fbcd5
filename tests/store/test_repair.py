"""Damage of every kind is repaired: good rows stay as they are, the others become pending."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from datagen.errors import RepairRefused
from datagen.store.arrow_part import Rows, open_batches
from datagen.store.fingerprint import Fingerprint
from datagen.store.journal import SIZE
from datagen.store.layout import RunLayout, part
from datagen.store.manifest import Manifest, build_manifest
from datagen.store.partition import Outcome
from datagen.store.plan import Plan
from datagen.store.repair import Repaired, repair_run
from datagen.store.run_status import run_status
from datagen.store.states import ShardReader
from datagen.store.verify import verify_run
from tests.forks import FORKS
from tests.store.faults import repair
from tests.store.rows import (
    REJECTED,
    collect,
    collect_partition,
    header,
    open_store,
    prepare_run,
    prompt_id,
    reject,
)

NUMBERS = {prompt_id(n): n for n in range(100)}
PROMPTS = 9


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout, plan = prepare_run(
        tmp_path_factory.mktemp("good") / "run", partitions=2, prompts=PROMPTS
    )
    for index in range(2):
        collect_partition(layout, plan, index, shard_bytes=12_000)
    build_manifest(layout, plan, header(layout))
    return layout.root


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def stored(root: Path) -> dict[tuple[str, str], object]:
    """(kind, sample id) -> the row as it is encoded in its file."""
    found: dict[tuple[str, str], object] = {}
    for path in sorted(root.rglob("*-*.arrow")):
        batches = Rows(open_batches(path))
        for row in range(len(batches)):
            key = (path.name[:4], batches[row].column("sample_id")[0].as_py())
            assert key not in found, f"{key} stands twice"
            found[key] = batches[row].to_pydict()
    return found


def rows(root: Path) -> dict[tuple[str, str], object]:
    """(kind, sample id) -> what it says: recaptured states may be encoded with another bias."""
    found = {k: v for k, v in stored(root).items() if k[0] == "resp"}
    for path in sorted(root.rglob("states-*.arrow")):
        shard = ShardReader(path)
        for row in range(len(shard)):
            c = shard.columns(row)
            values = (c.input_ids.tolist(), c.loss_mask.tolist(), shard.states(row).tobytes())
            found["stat", c.sample_id] = values
    return found


def go_on(root: Path) -> list[str]:
    """What a collect does: bring every sample to its outcome; returns what had to be asked."""
    layout = RunLayout(root)
    plan, asked = Plan.open(layout.plan), []
    digest = Fingerprint.load(layout.fingerprint).digest
    for index in range(plan.n_partitions):
        if layout.partition(index).summary.exists():
            continue
        store = open_store(layout.partition(index).root, digest=digest, shard_bytes=12_000)
        prompts = plan.partition(index)
        for prompt in prompts:
            number = NUMBERS[prompt.prompt_id]
            for turn in range(prompt.n_turns):
                outcome = store.outcome(prompt.prompt_id, turn)
                if outcome in (Outcome.PENDING, Outcome.RESPONDED):
                    asked.append(f"{outcome.value} {number}-{turn}")
                    reject(store, number) if number == REJECTED else collect(store, number, turn)
        store.seal(len(prompts))
        store.close()
    build_manifest(layout, plan, header(layout))
    return asked


def require_repaired(root: Path, whole: Path) -> tuple[Repaired, list[str]]:
    """Repair and go on: the run is that of `whole` again; returns what was asked for."""
    assert not verify_run(root).ok
    kept = rows_that_can_be_read(root, whole)
    done = repair_run(RunLayout(root))
    assert verify_run(root).ok, verify_run(root).faults
    after = stored(root)
    for key, row in kept.items():
        assert after[key] == row, f"{key} was good, and is lost or changed"
    asked = go_on(root)
    report = verify_run(root)
    assert report.ok, report.faults
    assert rows(root) == rows(whole)
    ours, theirs = (Manifest.load(RunLayout(r).manifest).samples for r in (root, whole))
    assert ours == theirs
    assert repair_run(RunLayout(root)).faults == [], "a repaired run needs no repair"
    return done, asked


def rows_that_can_be_read(root: Path, whole: Path) -> dict[tuple[str, str], object]:
    """Rows of files that are byte for byte those of `whole`, where their journal is too."""
    found = {}
    for path in sorted(root.rglob("*-*.arrow")):
        original = whole / path.relative_to(root)
        if original.exists() and original.read_bytes() == path.read_bytes():
            batches = Rows(open_batches(path))
            for row in range(len(batches)):
                key = (path.name[:4], batches[row].column("sample_id")[0].as_py())
                found[key] = batches[row].to_pydict()
    # a response that is lost takes the states of its sample with it
    said = {sample for kind, sample in found if kind == "resp"}
    return {k: v for k, v in found.items() if k[0] == "resp" or k[1] in said}


def first(root: Path, pattern: str) -> Path:
    return sorted(root.rglob(pattern))[0]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x04
    path.write_bytes(bytes(content))


def test_a_sound_run_is_left_as_it_is(run: Path) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert repair_run(RunLayout(run)).faults == []
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_one_flipped_byte_of_a_shard_costs_one_sample_and_no_response(
    run: Path, good: Path, tmp_path: Path
) -> None:
    seal = orjson.loads(first(run, "partition.json").read_bytes())
    listed = max(seal["states"], key=lambda f: f["rows"])
    assert listed["rows"] > 2
    shard = run / "partitions" / "00000" / listed["name"]
    ends = [0, *listed["row_ends"]]
    rng = random.Random(5)
    for row in range(listed["rows"]):
        root = Path(shutil.copytree(run, tmp_path / f"row-{row}"))
        flip(
            root / shard.relative_to(run),
            rng.randrange(ends[row] + 1100 * (row == 0), ends[row + 1]),
        )
        before = stored(good)
        done, asked = require_repaired(root, good)
        assert done.rows["states lost"] == 1
        assert done.rows["responses lost"] == 0
        assert len(asked) == 1
        assert asked[0].startswith("responded")
        changed = [key for key, row in stored(root).items() if row != before[key]]
        assert len(changed) <= 1, "every other sample is byte-identical"


@pytest.mark.parametrize("where", ["head", "foot", "cut", "emptied", "gone"])
def test_a_shard_whose_frame_is_damaged_is_repaired(run: Path, good: Path, where: str) -> None:
    shard = first(run, "states-*.arrow")
    size = shard.stat().st_size
    match where:
        case "head":
            flip(shard, 200)
        case "foot":
            flip(shard, size - 40)
        case "cut":
            shard.write_bytes(shard.read_bytes()[: size // 2])
        case "emptied":
            shard.write_bytes(b"")
        case "gone":
            shard.unlink()
    _, asked = require_repaired(run, good)
    assert all(a.startswith("responded") for a in asked)
    assert (where == "foot") == (asked == []), "a lost footer alone costs nothing"


def test_a_damaged_response_is_asked_for_again(run: Path, good: Path) -> None:
    path = first(run, "responses-*.arrow")
    ends = orjson.loads(first(run, "partition.json").read_bytes())["responses"][0]["row_ends"]
    flip(path, (ends[1] + ends[2]) // 2)
    done, asked = require_repaired(run, good)
    assert (done.rows["responses lost"], done.rows["states lost"]) == (1, 1)
    assert len(asked) == 1
    assert asked[0].startswith("pending")


def _edit_seal(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        path = first(root, "partition.json")
        data = orjson.loads(path.read_bytes())
        change(data)
        path.write_bytes(orjson.dumps(data))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: first(r, "journal.log").unlink(),
        lambda r: flip(first(r, "journal.log"), 3 * SIZE + 9),
        lambda r: flip(first(r, "journal.log"), 9),
        lambda r: first(r, "journal.log").write_bytes(first(r, "journal.log").read_bytes()[:-SIZE]),
        lambda r: first(r, "partition.json").unlink(),
        lambda r: first(r, "partition.json").write_bytes(b"{"),
        _edit_seal(lambda d: d.update(collected=1)),
        _edit_seal(lambda d: d["states"].pop()),  # type: ignore[attr-defined]
        lambda r: shutil.rmtree(r / "partitions" / "00001"),
        lambda r: first(r, "rejected.jsonl").unlink(),
        lambda r: flip(first(r, "rejected.jsonl"), 4),
        lambda r: (r / "manifest.json").write_bytes(b"{}"),
        lambda r: (r / "partitions/00000/states-099.arrow").touch(),
    ],
)
def test_damaged_books_are_written_anew(
    run: Path, good: Path, damage: Callable[[Path], None]
) -> None:
    damage(run)
    require_repaired(run, good)


def test_all_damages_at_once(run: Path, good: Path) -> None:
    flip(first(run, "states-*.arrow"), 3000)
    flip(first(run, "responses-*.arrow"), 3000)
    flip(first(run / "partitions" / "00001", "states-*.arrow"), 2000)
    first(run, "journal.log").unlink()
    require_repaired(run, good)


def test_what_hangs_on_one_file_alone_is_refused_with_its_name(run: Path) -> None:
    flip(run / "plan.arrow", (run / "plan.arrow").read_bytes().index(b"question 2"))
    with pytest.raises(RepairRefused, match=r"plan\.arrow"):
        repair_run(RunLayout(run))
    assert (run / "manifest.json").exists()


def test_without_journal_and_seal_nothing_is_thrown_away(run: Path) -> None:
    folder = run / "partitions" / "00000"
    for name in ("journal.log", "partition.json"):
        (folder / name).unlink()
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(RepairRefused, match="the journal holds nothing"):
        repair_run(RunLayout(run))
    assert sorted(p.name for p in folder.iterdir()) == before


def test_the_open_shard_of_an_unfinished_run_is_repaired(tmp_path: Path, good: Path) -> None:
    layout, plan = prepare_run(tmp_path / "run", partitions=2, prompts=PROMPTS)
    collect_partition(layout, plan, 0, seal=False, limit=6, shard_bytes=1 << 20)
    shard = part(layout.partition(0).states(0))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size * 2 // 3])
    assert not verify_run(layout.root).ok
    done = repair_run(layout)
    assert done.rows["states kept"] > 0
    assert done.rows["states lost"] > 0
    asked = go_on(layout.root)
    assert verify_run(layout.root).ok
    assert rows(layout.root) == rows(good)
    assert f"pending {NUMBERS[plan.partition(0)[0].prompt_id]}-0" not in asked


def test_a_file_recovered_after_a_kill_has_its_rows_where_the_seal_says(
    tmp_path: Path, good: Path
) -> None:
    layout, plan = prepare_run(tmp_path / "run", partitions=2, prompts=PROMPTS)
    for limit in (3, 6):  # each leaves an open file that the next recovers
        store_digest = Fingerprint.load(layout.fingerprint).digest
        store = open_store(layout.partition(0).root, digest=store_digest, shard_bytes=1 << 20)
        for prompt in plan.partition(0)[:limit]:
            for turn in range(prompt.n_turns):
                number = NUMBERS[prompt.prompt_id]
                if store.outcome(prompt.prompt_id, turn) is Outcome.PENDING:
                    reject(store, number) if number == REJECTED else collect(store, number, turn)
        store.commit()
        store.close()
    go_on(layout.root)
    flip(layout.partition(0).states(0), layout.partition(0).states(0).stat().st_size // 2)
    done, _ = require_repaired(layout.root, good)
    assert done.rows["states lost"] <= 1
    assert run_status(layout.root).complete


@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize(
    "stride", [20, pytest.param(1, marks=pytest.mark.slow)], ids=["every twentieth", "every"]
)
def test_a_repair_that_dies_at_a_system_call_loses_no_good_row(
    run: Path, good: Path, tmp_path: Path, stride: int, power_cut: bool
) -> None:
    flip(first(run, "states-*.arrow"), 3000)
    flip(first(run, "responses-*.arrow"), 6000)
    flip(first(run / "partitions" / "00001", "states-*.arrow"), 2000)
    undisturbed = Path(shutil.copytree(run, tmp_path / "undisturbed"))
    repair_run(RunLayout(undisturbed))
    kept = stored(undisturbed)
    at, finished, rng = 0, False, random.Random(stride)
    while not finished:
        at += rng.randint(1, 2 * stride - 1)
        root = Path(shutil.copytree(run, tmp_path / f"at-{at}"))
        process = FORKS.Process(target=repair, args=(root, at, power_cut))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -9)
        finished = process.exitcode == 0
        repair_run(RunLayout(root))
        after = stored(root)
        assert {k: after.get(k) for k in kept} == kept, f"lost after a death at call {at}"
        go_on(root)
        assert verify_run(root).ok
        assert rows(root) == rows(good)
        shutil.rmtree(root)
    assert at > 40
