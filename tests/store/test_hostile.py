"""Runs made to harm their reader: links that lead out, pipes, files without end, numbers beyond reason."""

from __future__ import annotations

import dataclasses
import errno
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from datagen.errors import CorruptFile, RepairRefused
from datagen.store.arrow_batches import open_batches
from datagen.store.layout import RunLayout, part
from datagen.store.manifest import Manifest
from datagen.store.repair import repair_run
from datagen.store.run_reader import RunReader
from datagen.store.salvage import DamagedFile
from datagen.store.states import ShardReader
from datagen.store.verify import verify_run
from tests.store.rows import SPEC, complete_run, states_like
from tests.store.test_codecs import part_of

READ = """
import json, resource, signal, sys
from pathlib import Path
from datagen.errors import DatagenError
from datagen.store.run_reader import RunReader
from datagen.store.verify import verify_run
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
def read(root):
    run = RunReader.open(root / "manifest.json")
    for number in range(len(run)):
        run.columns(number), run.states(number)
    list(run.token_columns())
def verify(root):
    if verify_run(root).faults:
        raise DatagenError("faults")
refused = {}
for name in sys.argv[1:]:
    refused[name] = []
    for what in (read, verify):
        print(what.__name__, name, file=sys.stderr)
        signal.alarm(90)
        try:
            what(Path(name))
        except DatagenError:
            refused[name].append(what.__name__)
signal.alarm(0)
print(json.dumps(refused))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile") / "run"
    complete_run(root, prompts=2)
    return root


def refusals(roots: list[Path]) -> list[set[str]]:
    """Of each run, whether reading and verifying were refused, in a process with little memory and time."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, roots)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [set(found) for found in json.loads(done.stdout).values()]


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    os.truncate(path, 1 << 42)


def test_what_is_no_file_of_its_size_is_refused_at_once(whole: Path, tmp_path: Path) -> None:
    layout = RunLayout(whole)
    of_run = layout.partition(0)
    paths = (layout.manifest, of_run.journal, of_run.states(0), of_run.responses(0), of_run.summary,
             layout.fingerprint, layout.plan)  # fmt: skip
    read = {layout.manifest, of_run.journal, of_run.states(0)}
    cases = [(harm, path) for harm in (pipe, endless, huge) for path in paths]
    roots = [tmp_path / f"{harm.__name__}-{path.name}" for harm, path in cases]
    for root, (harm, path) in zip(roots, cases, strict=True):
        shutil.copytree(whole, root)
        harm(root / path.relative_to(whole))
    for root, (_, path), found in zip(roots, cases, refusals(roots), strict=True):
        assert found == {"verify", "read"} if path in read else found == {"verify"}, root.name


def test_a_link_out_of_the_run_is_not_followed(whole: Path, tmp_path: Path) -> None:
    root, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(whole, root)
    shutil.move(root / "partitions" / "00000", outside)
    (root / "partitions" / "00000").symlink_to(outside)
    with pytest.raises(CorruptFile, match="leads out of the run"):
        RunReader.open(root / "manifest.json")
    with pytest.raises(CorruptFile, match="leads out of the run"):
        Manifest.load(root / "manifest.json").require_files(root)
    require_found(root, "partitions/00000")
    assert any(outside.iterdir())


@pytest.mark.parametrize("name", ["states-000.arrow", "responses-000.arrow", "journal.log"])
def test_a_file_that_is_a_link_out_of_the_run_is_found(
    whole: Path, tmp_path: Path, name: str
) -> None:
    root, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(whole, root)
    shutil.move(root / "partitions" / "00000" / name, outside)
    (root / "partitions" / "00000" / name).symlink_to(outside)
    require_found(root, f"partitions/00000/{name}")


def require_found(root: Path, link: str) -> None:
    """A verification names the link, and a repair lets everything be as it is."""
    for quick in (True, False):
        faults = [str(f) for f in verify_run(root, quick=quick).faults]
        assert f"{link}: a link leads out of the run" in faults
    with pytest.raises(RepairRefused, match="a link leads out of the run"):
        repair_run(RunLayout(root))
    assert RunLayout(root).manifest.exists()


def test_a_link_within_the_run_is_followed(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    (root / "partitions" / "00000").rename(root / "elsewhere")
    (root / "partitions" / "00000").symlink_to(Path("..") / "elsewhere")
    assert len(RunReader.open(root / "manifest.json").states(0))
    assert verify_run(root).ok


def test_a_run_reached_through_a_link_is_read(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(whole)
    assert len(RunReader.open(tmp_path / "link" / "manifest.json").states(0))


IMPOSSIBLE: list[tuple[tuple[Any, ...], object]] = [
    (("splits", "train", "states", 0, "path"), "../outside.arrow"),
    (("splits", "train", "states", 0, "path"), "/etc/passwd"),
    (("splits", "train", "states", 0, "path"), "partitions/../../x.arrow"),
    (("splits", "train", "states", 0, "path"), "partitions/00000/states-000.arrow\0"),
    (("splits", "train", "states", 0, "rows"), -1),
    (("splits", "train", "states", 0, "rows"), 2**63),
    (("splits", "train", "states", 0, "bytes"), 1e308),
    (("samples", "collected"), 2**62),
    (("states", "hidden_size"), 2**40),
    (("states", "hidden_size"), -16),
    (("states", "dtype"), "F64"),
    (("states", "boundaries"), [2**70]),
    (("states", "boundaries"), list(range(100_000))),
    (("states", "codec"), "pickle"),
    (("splits",), {"train": []}),
]


def test_a_manifest_of_impossible_values_is_refused(whole: Path, tmp_path: Path) -> None:
    roots = [tmp_path / str(number) for number in range(len(IMPOSSIBLE))]
    for root, (at, value) in zip(roots, IMPOSSIBLE, strict=True):
        shutil.copytree(whole, root)
        path = root / "manifest.json"
        stated = orjson.loads(path.read_bytes())
        inner = stated
        for step in at[:-1]:
            inner = inner[step]
        inner[at[-1]] = value
        path.write_text(json.dumps(stated))
    for case, found in zip(IMPOSSIBLE, refusals(roots), strict=True):
        assert found == {"read", "verify"}, case


def test_salvage_does_not_allocate_what_a_damaged_buffer_states(tmp_path: Path) -> None:
    """As repair reads an open shard, of whose rows no checksums are known."""
    spec = dataclasses.replace(SPEC, codec="ipc-zstd")
    file = part_of(tmp_path / "states-000.arrow", spec, [states_like(900, seed=n) for n in (1, 2)])
    file.sync()
    path = part(tmp_path / "states-000.arrow")
    raw = bytearray(path.read_bytes())
    ends = [open_batches(path, end=len(raw)).end(row) for row in range(2)]
    file.abandon()
    plane = 900 * SPEC.width
    at = raw.rindex(struct.pack("<q", plane))  # the size before the last compressed buffer
    raw[at : at + 8] = struct.pack("<q", 1 << 33)
    path.write_bytes(raw)
    before = pa.total_allocated_bytes()
    found = DamagedFile("states", path, ends, ()).good_rows()
    assert list(found) == [0]
    assert pa.default_memory_pool().max_memory() - before < 1 << 32


FEW_FILES = """
import resource, sys
from pathlib import Path
from datagen.errors import LimitReached
from datagen.store.layout import RunLayout
from datagen.store.repair import repair_run
from datagen.store.run_reader import RunReader
from datagen.store.salvage import DamagedFile
from datagen.store.states import ShardReader
from datagen.store.verify import verify_run
root = Path(sys.argv[1])
run = RunReader.open(root / "manifest.json")
shard = RunLayout(root).partition(0).states(0)
run.states(0), verify_run(root)  # what is imported, and threads
held = [open("/dev/null")]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[0].fileno() + 1, 64))
for what in (
    lambda: RunReader.open(root / "manifest.json"), lambda: ShardReader(shard),
    lambda: verify_run(root), lambda: repair_run(RunLayout(root)),
    lambda: DamagedFile("states", shard, [], ()).good_rows(),
):
    try:
        what()
    except LimitReached as e:
        assert "raise `ulimit -n`" in str(e) and "datagen verify" not in str(e), e
    else:
        raise SystemExit("not refused")
"""


def test_a_limit_of_the_system_is_no_damage_of_a_file(whole: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(whole, tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(root)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert verify_run(root).ok


def test_an_open_shard_is_one_file_and_one_mapping(whole: Path) -> None:
    path = RunLayout(whole).partition(0).states(0)
    shard = ShardReader(path)
    shard.columns(0), shard.states(0)
    assert Path("/proc/self/maps").read_text().count(f"{path}\n") == 1
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert links.count(str(path)) == 1
    plane = shard.raw_plane(0)
    before = plane.copy()
    del shard  # what was taken out of it stays
    assert (plane == before).all()


def test_advice_that_the_system_refuses_costs_nothing(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, *_: int) -> None:
            asked.append(1)
            raise OSError(errno.EAGAIN, "no advice now")

    asked: list[int] = []
    path = RunLayout(whole).partition(0).states(0)
    with path.open("rb") as f:
        mapping = Mapping(f.fileno(), 0, prot=mmap.PROT_READ)
    monkeypatch.setattr("datagen.store.arrow_batches.map_file", lambda _: mapping)
    shard = ShardReader(path)
    assert len(shard.states(len(shard) - 1))
    assert asked
