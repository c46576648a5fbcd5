"""Bytes to rows: lines are cut at line feeds only, and damage is told, not raised, line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datagen.errors import PromptDataError
from datagen.prompts import reader
from datagen.prompts.reader import Fault, RawLine, parse_line, read_lines, read_table_rows


@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=20))
def test_lines_are_the_pieces_between_line_feeds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    if lines and lines[0].startswith(reader.UTF16_MARKS):
        lines[0] = b""
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    read = list(read_lines(path))
    assert [line.data for line in read] == lines
    assert [line.number for line in read] == list(range(1, len(lines) + 1))
    assert not any(line.ends_file for line in read)


@given(st.binary(max_size=200))
def test_no_line_makes_the_parser_raise(data: bytes) -> None:
    parse_line(RawLine(3, data.replace(b"\n", b"")))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_json_writes_is_read_back_whatever_its_line_separators(value: object) -> None:
    line = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert parse_line(RawLine(2, line)) == value or b"\xed" in line


def test_lines_longer_than_a_block_arrive_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 7)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"a" * 50 + b"\n\n" + b"b" * 9)
    assert [(x.data, x.ends_file) for x in read_lines(path)] == [
        (b"a" * 50, False), (b"", False), (b"b" * 9, True),
    ]  # fmt: skip


def test_an_endless_line_is_a_fault_and_not_a_memory_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 10)
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 100)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"a" * 1000 + b"\n{}\n")
    first, second = read_lines(path)
    assert len(first.data) < 200
    assert parse_line(first) == Fault("line_too_long", "1,000 bytes")
    assert parse_line(second) == {}


def test_zstd_with_several_frames_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    frames = [zstandard.compress(b'{"a":1}\n{"b"'), zstandard.compress(b":2}\n")]
    path.write_bytes(b"".join(frames))
    assert [line.data for line in read_lines(path)] == [b'{"a":1}', b'{"b":2}']


@pytest.mark.parametrize("cut", [5, 100, -1])
def test_a_zstd_file_that_was_cut_off_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.jsonl.zst"
    content = "".join(json.dumps({"i": i, "h": hash(i)}) + "\n" for i in range(2000))
    path.write_bytes(zstandard.compress(content.encode())[:cut])
    with pytest.raises(PromptDataError, match=r"cut off.*fetch it again"):
        list(read_lines(path))


def test_a_file_that_only_claims_to_be_zstd_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(b'{"messages": []}\n' * 10)
    with pytest.raises(PromptDataError, match="no valid zstd"):
        list(read_lines(path))


def test_utf16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"a": 1}\n'.encode("utf-16"))
    with pytest.raises(PromptDataError, match="UTF-16"):
        list(read_lines(path))


def test_a_byte_order_mark_is_allowed_at_the_start_of_the_file_only() -> None:
    marked = b"\xef\xbb\xbf{}"
    assert parse_line(RawLine(1, marked)) == {}
    fault = parse_line(RawLine(2, marked))
    assert isinstance(fault, Fault)
    assert fault.reason == "bad_json"


def test_nesting_without_end_is_a_fault() -> None:
    fault = parse_line(RawLine(1, b"[" * 100_000 + b"]" * 100_000))
    assert isinstance(fault, Fault)
    assert fault.reason == "bad_json"


@pytest.mark.parametrize("kind", ["x.parquet", "file.arrow", "stream.arrow"])
def test_tables_give_dicts(tmp_path: Path, kind: str) -> None:
    table = pa.table({"id": list(range(3000)), "tools": [None] * 3000})
    path = tmp_path / kind
    if kind == "x.parquet":
        pq.write_table(table, path, row_group_size=700)
    else:
        new = pa.ipc.new_file if kind.startswith("file") else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=900)
    assert list(read_table_rows(path)) == table.to_pylist()


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_table_that_is_none_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"not a table at all")
    with pytest.raises(PromptDataError, match="cannot be read"):
        list(read_table_rows(path))
