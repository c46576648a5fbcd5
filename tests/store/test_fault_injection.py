"""Every byte of a shard, every block's end, every field of the manifest: verify sees the change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from datagen.store.arrow_message import blocks_of
from datagen.store.layout import RunLayout
from datagen.store.verify import verify_run
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


def flip_every(root: Path, places: range) -> Iterator[int]:
    """Places at which a flipped byte goes unseen."""
    path = shard_of(root)
    whole = path.read_bytes()
    try:
        for at in places:
            bad = bytearray(whole)
            bad[at] ^= 1 << at % 8
            path.write_bytes(bad)
            if verify_run(root, quick=bool(at % 2)).ok:
                yield at
    finally:
        path.write_bytes(whole)


def test_a_flipped_byte_is_seen(root: Path) -> None:
    size = shard_of(root).stat().st_size
    assert not list(flip_every(root, range(size % STRIDE, size, STRIDE)))


@pytest.mark.slow
def test_every_flipped_byte_is_seen(root: Path) -> None:
    assert not list(flip_every(root, range(shard_of(root).stat().st_size)))


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
