"""Every byte of a shard, every block's end, every field of the manifest: verify sees the change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from datagen.store.arrow_message import blocks_of
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.plan import Plan
from datagen.store.verify import verify_run
from datagen.store.verify_partition import PartitionCheck
from tests.store.rows import complete_run

STRIDE = 211  # a prime: over the runs of a format's history every place is met
FREE_TEXT = {"created", "run", "code_version", "servers", "preflight", "sampling"}
"""Manifest fields that are a record for people: nothing else on disk says the same."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults") / "run"
    complete_run(root, prompts=2)
    assert verify_run(root).ok
    return root


def shard_of(root: Path) -> Path:
    return RunLayout(root).partition(0).states(0)


@contextmanager
def flipped(path: Path, places: range) -> Iterator[Iterator[int]]:
    """Places of the file, a bit of each flipped while it is the one; afterwards the file is whole."""
    whole = path.read_bytes()

    def each() -> Iterator[int]:
        for at in places:
            with open(path, "r+b") as f:
                f.seek(at)
                f.write(bytes([whole[at] ^ 1 << at % 8]))
                f.flush()
                yield at
                f.seek(at)
                f.write(whole[at : at + 1])

    try:
        yield each()
    finally:
        path.write_bytes(whole)


def test_a_flipped_byte_is_seen(root: Path) -> None:
    size = shard_of(root).stat().st_size
    with flipped(shard_of(root), range(size % STRIDE, size, STRIDE)) as places:
        assert not [at for at in places if verify_run(root, quick=bool(at % 2)).ok]


@pytest.mark.slow
def test_every_flipped_byte_is_seen(root: Path) -> None:
    """At both depths, by the check of the shard's partition: a fault it finds is one of the run's."""
    layout = RunLayout(root)
    plan, digest = Plan.open(layout.plan), Fingerprint.load(layout.fingerprint).digest
    unseen, seen = [], 0
    with flipped(shard_of(root), range(shard_of(root).stat().st_size)) as places:
        for at in places:
            for quick in (True, False):
                faults = PartitionCheck(layout, plan, digest, 0, quick=quick).run().faults
                if any("states-000.arrow" in fault.file for fault in faults):
                    seen += 1
                else:
                    unseen.append((at, quick))
    assert not unseen
    assert seen == 2 * shard_of(root).stat().st_size > 10_000
    assert verify_run(root).ok


def test_a_column_whose_name_is_no_text_is_seen(root: Path) -> None:
    layout = RunLayout(root)
    for path, name in (
        (shard_of(root), b"sample_id"),
        (layout.partition(0).responses(0), b"context_ids"),
    ):
        whole = path.read_bytes()
        try:
            path.write_bytes(whole.replace(name, b"\xfe" + name[1:]))
            for quick in (True, False):
                assert any(path.name in f.file for f in verify_run(root, quick=quick).faults)
        finally:
            path.write_bytes(whole)


def test_a_shard_cut_at_any_block_is_seen(root: Path) -> None:
    path = shard_of(root)
    whole = path.read_bytes()
    ends = {0, 8, len(whole) - 1, len(whole) - 6, len(whole) - 10}
    for offset, metadata, body in blocks_of(lambda at, n: whole[at : at + n], len(whole)).tolist():
        ends |= {offset, offset + metadata, offset + metadata + body, offset + metadata + body // 2}
    assert len(ends) > 8
    try:
        for end in sorted(ends):
            path.write_bytes(whole[:end])
            for quick in (True, False):
                faults = verify_run(root, quick=quick).faults
                assert any("states-000.arrow" in f.file for f in faults), end
    finally:
        path.write_bytes(whole)


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all leaves of plain data, empty containers among them."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*at, key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, (*at, index))
    else:
        yield at


def altered(manifest: Any, at: tuple[Any, ...]) -> Any:
    """The manifest with the leaf at `at` changed a little, still of its type."""
    changed = copy.deepcopy(manifest)
    inner = changed
    for step in at[:-1]:
        inner = inner[step]
    value = inner[at[-1]]
    match value:
        case bool():
            new: Any = not value
        case int() | float():
            new = value + 1
        case str():
            new = (
                ("0" if value[:1] != "0" else "1") + value[1:] if len(value) == 64 else value + "x"
            )
        case dict():
            new = {"more": 1}
        case list():
            new = [1]
        case _:
            new = 1
    inner[at[-1]] = new
    return changed


def test_every_altered_field_of_the_manifest_is_seen(root: Path) -> None:
    path = RunLayout(root).manifest
    whole = path.read_bytes()
    stated = orjson.loads(whole)
    unseen = []
    seen = set()
    try:
        for at in leaves(stated):
            if at[0] == "token_frequencies" and int(at[1]) % 10:
                continue  # a tenth of some hundred alike
            path.write_bytes(orjson.dumps(altered(stated, at)))
            if verify_run(root, quick=at[0] != "states").ok:
                unseen.append(at)
            else:
                seen.add(at[0])
    finally:
        path.write_bytes(whole)
    assert {at[0] for at in unseen} <= FREE_TEXT, unseen
    assert seen | FREE_TEXT == set(stated)
