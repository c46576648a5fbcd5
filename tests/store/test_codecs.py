"""Every registered codec, through the files it is kept in."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from datagen.config import collect_config
from datagen.errors import ConfigError, CorruptFile
from datagen.store import codecs
from datagen.store.arrow_part import ArrowPart, recover
from datagen.store.codecs import REGISTRY, Frames, _planes, codec_named
from datagen.store.codecs._planes import BLOCK_TOKENS
from datagen.store.codecs.mantissa_4 import rounded
from datagen.store.encoder import Encoder
from datagen.store.layout import part
from datagen.store.states import ShardReader, StatesSpec, encode, fit, to_batch
from tests.store.rows import prompt_id, states_like

EVERY_PATTERN = np.arange(65536, dtype=np.uint16)


def spec_of(codec: str, hidden: int = 16) -> StatesSpec:
    return StatesSpec((1, 3, 4), "post", "BF16", hidden, codec)


def part_of(path: Path, spec: StatesSpec, samples: list[NDArray[np.uint16]]) -> ArrowPart:
    """An open shard of `samples`."""
    params = fit(spec, samples[0])
    file = ArrowPart(path, spec.schema(params))
    for number, rows in enumerate(samples):
        file.append(
            to_batch(
                file.schema, prompt_id=prompt_id(number), turn=0, n_context=1,
                input_ids=np.arange(len(rows), dtype=np.int32), encoded=encode(spec, params, rows),
            )
        )  # fmt: skip
    return file


def values_of(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    widened: NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return widened


def test_the_codecs_are_these() -> None:
    assert {name: codec.lossless for name, codec in REGISTRY.items()} == {
        "plane": True, "ipc-zstd": True, "mantissa-4": False,
    }  # fmt: skip


@pytest.mark.parametrize("name", REGISTRY)
def test_a_shard_brings_back_all_patterns_or_the_nearest(tmp_path: Path, name: str) -> None:
    spec = spec_of(name)
    samples = [EVERY_PATTERN.reshape(-1, spec.width), states_like(9, spec=spec)]
    sealed = part_of(tmp_path / "states-000.arrow", spec, samples).seal()
    reader = ShardReader(sealed.path)
    assert reader.spec == spec
    metadata = pa.ipc.open_file(str(sealed.path)).schema.metadata
    assert metadata[b"codec"].decode() == name
    assert int(metadata[b"codec_version"]) == codec_named(name).version
    for row, rows in enumerate(samples):
        wanted = rows if codec_named(name).lossless else rounded(rows)
        assert np.array_equal(reader.states(row).reshape(rows.shape), wanted)
        assert reader.columns(row).input_ids.tolist() == list(range(len(rows)))


@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_part_of_a_sample_is_that_part_of_the_whole(name: str, data: st.DataObject) -> None:
    codec, hidden = codec_named(name), data.draw(st.sampled_from([1, 3, 8]))
    n_layers = data.draw(st.integers(1, 4))
    n_tokens = data.draw(st.sampled_from([1, 2, BLOCK_TOKENS, BLOCK_TOKENS + 1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = rng.integers(0, 65536, (n_tokens, n_layers * hidden), dtype=np.uint16)
    params = codec.fit(rows[:1], hidden)
    exp, sm = codec.encode(rows, hidden, params)
    bound = st.integers(-n_tokens - 2, n_tokens + 2)
    tokens = slice(data.draw(bound), data.draw(bound | st.none()))
    layers = data.draw(st.lists(st.integers(0, n_layers - 1), max_size=5))
    found = codec.decode(exp, sm, n_tokens, rows.shape[1], hidden, params, tokens, layers)
    whole = (rows if codec.lossless else rounded(rows)).reshape(n_tokens, n_layers, hidden)
    assert np.array_equal(found, whole[tokens][:, layers])


@pytest.mark.parametrize("name", REGISTRY)
def test_a_killed_writers_part_is_recovered(tmp_path: Path, name: str) -> None:
    spec = spec_of(name)
    samples = [states_like(n, seed=n, spec=spec) for n in (5, 700, 3)]
    path = tmp_path / "states-000.arrow"
    file = part_of(path, spec, samples[:2])
    end = file.n_bytes
    file.sync()
    file.abandon()
    with part(path).open("ab") as f:
        f.write(b"\xff\xff\xff\xff torn")
    open_reader = ShardReader(part(path), end=end)
    assert len(open_reader) == 2
    assert open_reader.columns(1).n_tokens == 700
    assert recover(path, rows=2, end=end) is not None
    reader = ShardReader(path)
    for row in range(2):
        assert np.array_equal(reader.states(row), open_reader.states(row))
    if codec_named(name).ipc_compression:
        assert path.stat().st_size < 0.9 * sum(s.nbytes for s in samples[:2])


def test_any_arrow_reader_understands_ipc_zstd(tmp_path: Path) -> None:
    spec = spec_of("ipc-zstd")
    rows = EVERY_PATTERN.reshape(-1, spec.width)
    path = part_of(tmp_path / "states-000.arrow", spec, [rows]).seal().path
    (row,) = pa.ipc.open_file(str(path)).read_all().select(["exp", "sm"]).to_pylist()
    exp, sm = (np.array(row[name], dtype=np.uint16) for name in ("exp", "sm"))
    assert np.array_equal((sm & 1) << 15 | exp << 7 | sm >> 1, rows.reshape(-1))


def test_the_raw_plane_of_a_sample_is_mapped_not_copied(tmp_path: Path) -> None:
    spec = spec_of("plane")
    rows = states_like(40, spec=spec)
    reader = ShardReader(part_of(tmp_path / "states-000.arrow", spec, [rows]).seal().path)
    plane_TW = reader.raw_plane(0)
    assert np.array_equal(plane_TW, (rows << 1 & 0xFE | rows >> 15).astype(np.uint8))
    assert plane_TW.ctypes.data == reader.raw_plane(0).ctypes.data
    assert not plane_TW.flags.writeable


@pytest.mark.parametrize("name", REGISTRY)
def test_a_sample_is_read_from_its_buffers_alone_where_arrow_has_nothing_to_inflate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec = spec_of(name)
    samples = [states_like(n, seed=n, spec=spec) for n in (7, BLOCK_TOKENS + 3)]
    file = part_of(tmp_path / "states-000.arrow", spec, samples)
    file.sync()
    growing = ShardReader(part(file.path), end=file.n_bytes)
    sealed = ShardReader(file.seal().path)
    wanted = [sealed.states(row) for row in range(2)]
    for reader in (growing, sealed):

        def made(*_: object) -> pa.RecordBatch:
            raise AssertionError("Arrow made a batch")

        monkeypatch.setattr(reader._batches, "columns", made)
        for row in range(2):
            if codec_named(name).ipc_compression:
                with pytest.raises(AssertionError, match="Arrow made a batch"):
                    reader.states(row)
            else:
                assert np.array_equal(reader.states(row), wanted[row])
    assert (sealed._batches.buffers(0, [0], whole=True) is None) == bool(
        codec_named(name).ipc_compression
    )


def test_a_batch_of_two_rows_is_refused(tmp_path: Path) -> None:
    spec = spec_of("plane")
    file = part_of(tmp_path / "one.arrow", spec, [states_like(n, spec=spec) for n in (7, 9)])
    table = pa.ipc.open_file(str(file.seal().path)).read_all().combine_chunks()
    path = tmp_path / "states-000.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    for read in (ShardReader(path).states, ShardReader(path).columns, ShardReader(path).raw_plane):
        with pytest.raises(CorruptFile, match="row 0: a batch of 2 rows"):
            read(0)


def test_a_compressed_buffer_that_states_a_huge_size_is_refused_before_it_is_allocated(
    tmp_path: Path,
) -> None:
    spec = spec_of("ipc-zstd")
    rows = states_like(900, spec=spec)
    path = part_of(tmp_path / "states-000.arrow", spec, [rows]).seal().path
    raw = path.read_bytes()
    stated = struct.pack("<q", rows.size)
    assert (
        raw.count(stated + b"\x28\xb5\x2f\xfd") == 2
    )  # the two planes, each before its zstd frame
    for size in (2**40, 2**31, -2, -(2**63)):
        path.write_bytes(raw.replace(stated + b"\x28", struct.pack("<q", size) + b"\x28"))
        reader = ShardReader(path)
        with pytest.raises(CorruptFile, match="state"):
            reader.states(0)


# -- mantissa-4 ---------------------------------------------------------------------------------


def test_mantissa_4_is_off_by_a_32nd_at_most_whatever_the_pattern() -> None:
    kept = rounded(EVERY_PATTERN)
    finite = (EVERY_PATTERN & 0x7F80) != 0x7F80
    before, after = (values_of(p[finite]).astype(float) for p in (EVERY_PATTERN, kept))
    assert np.isfinite(after).all()
    error, size = np.abs(after - before), np.abs(before)
    largest = 0x7F7C  # from here on up, to nearest would be infinity
    inner = (EVERY_PATTERN[finite] & 0x7FFF) < largest
    step = 2.0**-133  # of bf16's denormals
    assert (error[inner] <= np.maximum(size[inner] / 32, 4 * step)).all()
    assert (error[~inner] <= size[~inner] / 31).all()
    assert np.array_equal(kept[finite] >> 15, EVERY_PATTERN[finite] >> 15)
    assert (kept[finite] & 7 == 0).all()


def test_mantissa_4_keeps_nan_infinity_and_zero_and_changes_nothing_twice() -> None:
    kept = rounded(EVERY_PATTERN)
    before, after = values_of(EVERY_PATTERN), values_of(kept)
    assert np.array_equal(np.isnan(before), np.isnan(after))
    assert np.array_equal(np.isinf(before), np.isinf(after))
    assert np.array_equal(rounded(kept), kept)
    for zero in (0x0000, 0x8000):
        assert kept[zero] == zero


def test_mantissa_4_halves_gaussian_states() -> None:
    spec = StatesSpec((2, 15, 27), "post", "BF16", 576, "mantissa-4")
    rows = states_like(600, spec=spec)
    assert 2.0 < rows.nbytes / encode(spec, fit(spec, rows), rows).n_bytes < 2.2


# -- zstd ---------------------------------------------------------------------------------------


def framed(content: NDArray[np.uint8]) -> tuple[Frames, NDArray[np.uint16]]:
    """A sample of one layer whose exponents, less a bias of none, are `content` [tokens, H]."""
    rows = content.astype(np.uint16) << 7
    exp, _ = codec_named("plane").encode(rows, content.shape[1], bytes(content.shape[1]))
    return exp, rows


def unframed(exp: Frames, rows: NDArray[np.uint16]) -> NDArray[np.uint16]:
    n, hidden = rows.shape
    found = codec_named("plane").decode(
        exp, bytes(rows.size), n, hidden, hidden, bytes(hidden), slice(None), [0]
    )
    return found.reshape(rows.shape)


def test_a_frame_is_huffman_coded_and_any_zstd_reads_it() -> None:
    """No match is looked for, and yet the size is what Huffman codes of a skewed byte give."""
    content = np.random.default_rng(0).geometric(0.5, (500, 600)).astype(np.uint8)
    exp, rows = framed(content)
    assert exp.count == 1
    assert 2.0 < 8 * exp.n_bytes / content.size < 2.02  # the entropy of it is 2 bits
    assert zstandard.frame_content_size(exp.data) == content.size
    assert zstandard.ZstdDecompressor().decompress(exp.data) == content.tobytes()
    assert np.array_equal(unframed(exp, rows), rows)


def test_a_frame_of_another_size_or_with_more_behind_it_is_refused() -> None:
    exp, rows = framed(np.arange(100, dtype=np.uint8).reshape(10, 10))
    frame = bytes(exp.data)
    for bad in (frame[:-1], frame + b"more", frame * 2, b"", b"no frame"):
        with pytest.raises(ValueError, match="frame 0"):
            unframed(Frames.checked(bad, np.array([0, len(bad)])), rows)
    for tokens in (9, 11):
        with pytest.raises(ValueError, match="frame 0"):
            unframed(exp, np.empty((tokens, 10), dtype=np.uint16))


@pytest.mark.parametrize(
    "ends", [[], [0, 200], [-1, 100], [50, 20], [0, 60, 40, 100], [1 << 62, (1 << 63) - 1]]
)
def test_ends_that_leave_the_data_never_reach_compiled_code(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="ends of frames"):
        Frames.checked(bytes(100), np.array(ends, dtype=np.int64))


@pytest.mark.parametrize("name", REGISTRY)
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    codec, rows = codec_named(name), np.zeros((3, 64), dtype=np.uint16)
    params = codec.fit(rows, 16)
    exp, sm = codec.encode(rows, 16, params)
    with pytest.raises(ValueError, match="layers"):
        codec.decode(exp, sm, 3, 64, 16, params, slice(None), [4])
    with pytest.raises(ValueError, match="layers"):
        codec.decode(exp, sm, 3, 64, 48, params, slice(None), [0])
    if params:
        for width, bias in ((48, params), (16, b""), (16, params[:5])):
            with pytest.raises(ValueError, match="bias"):
                codec.encode(rows, width, bias)


def test_rows_of_any_layout_are_encoded_alike_and_of_another_dtype_refused() -> None:
    rows = states_like(9, spec=spec_of("plane"))
    wide = np.repeat(rows, 2, axis=1)[:, ::2]
    frozen = rows.copy()
    frozen.flags.writeable = False
    encoder = Encoder(spec_of("plane"))
    first = encoder(rows)
    for other in (wide, np.asfortranarray(rows), frozen):
        assert bytes(encoder(other).exp.data) == bytes(first.exp.data)
    with pytest.raises(ValueError, match="uint16"):
        encoder(rows.view(np.int16))


def test_a_file_that_changes_after_its_ends_were_looked_at_changes_nothing(tmp_path: Path) -> None:
    spec, path = spec_of("plane"), tmp_path / "states-000.arrow"
    sealed = part_of(path, spec, [states_like(700, spec=spec)]).seal()
    reader = ShardReader(sealed.path)
    row = reader._row(0)
    place = sealed.path.read_bytes().find(row.exp.ends.tobytes())
    assert place > 0
    with sealed.path.open("r+b") as f:
        f.seek(place)
        f.write(struct.pack("<q", 1 << 60) * len(row.exp.ends))
    assert row.exp.ends[-1] < 1 << 60


def test_a_long_sample_is_compressed_in_several_calls_to_the_same_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, rows = spec_of("plane"), states_like(3 * BLOCK_TOKENS + 5, spec=spec_of("plane"))
    params = fit(spec, rows)
    whole = encode(spec, params, rows)
    monkeypatch.setattr(_planes, "CALL_BYTES", 2 * BLOCK_TOKENS * spec.width)
    parts = encode(spec, params, rows)
    assert bytes(parts.exp.data) == bytes(whole.exp.data)
    assert parts.exp.ends.tolist() == whole.exp.ends.tolist()
    assert len(whole.exp.ends) == 5


# -- the registry -------------------------------------------------------------------------------


def test_a_new_codec_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(codecs.__path__[0], "plane.py").read_text()
    (tmp_path / "plane_two.py").write_text(source.replace('name = "plane"', 'name = "plane-two"'))
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(tmp_path)])
    try:
        assert set(codecs._discovered()) == {*REGISTRY, "plane-two"}
    finally:
        sys.modules.pop("datagen.store.codecs.plane_two")
        del codecs.plane_two


@pytest.mark.parametrize("name", REGISTRY)
def test_a_run_may_choose_any_registered_codec(name: str) -> None:
    assert collect_config(codec=name).content["codec"] == name


def test_a_run_with_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"codec.*'zip'.*plane"):
        collect_config(codec="zip")
