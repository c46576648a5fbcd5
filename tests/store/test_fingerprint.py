from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.errors import CorruptFile, FingerprintMismatch
from datagen.store.fingerprint import Fingerprint

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
FIELDS = st.dictionaries(st.text(max_size=3), PLAIN, max_size=4)


def test_the_order_of_fields_does_not_matter() -> None:
    assert Fingerprint({"a": 1, "b": [1, 2]}).digest == Fingerprint({"b": [1, 2], "a": 1}).digest


def test_it_comes_back_from_disk(tmp_path: Path) -> None:
    made = Fingerprint({"target": {"model": "tiny", "layers": [1, 2]}, "seed": None})
    made.save(tmp_path / "fingerprint.json")
    loaded = Fingerprint.load(tmp_path / "fingerprint.json")
    assert (loaded.digest, loaded.fields) == (made.digest, made.fields)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b is 2, was 1"),
        ({"a": 1}, {"a": 1, "b": None}, "b is None, was absent"),
        ({"a": {"b": 1}}, {"a": {}}, "a.b is absent, was 1"),
        ({"a": 1}, {"a": True}, "a is True, was 1"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"a is \[1, 3\], was \[1, 2\]"),
    ],
)
def test_resuming_under_other_settings_names_each_of_them(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], named: str
) -> None:
    with pytest.raises(FingerprintMismatch, match=named):
        Fingerprint(new).require_same(Fingerprint(old), tmp_path)


@given(FIELDS, FIELDS)
def test_fields_differ_exactly_when_digests_do(a: dict[str, Any], b: dict[str, Any]) -> None:
    one, other = Fingerprint(a), Fingerprint(b)
    assert (one.digest == other.digest) == (not one.differences(other))


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fingerprint.json"
    Fingerprint({"seed": 1}).save(path)
    path.write_bytes(path.read_bytes().replace(b'"seed": 1', b'"seed": 2'))
    with pytest.raises(CorruptFile, match="digest"):
        Fingerprint.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"fields": 1}', b"\xff\xfe"])
def test_a_file_that_is_no_fingerprint_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fingerprint.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFile):
        Fingerprint.load(path)
