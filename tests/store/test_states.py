from __future__ import annotations

import base64
import dataclasses
import random
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from datagen.errors import ConfigError, CorruptFile
from datagen.store import responses
from datagen.store.arrow_message import _batch, blocks_of
from datagen.store.arrow_part import ArrowPart
from datagen.store.codecs import REGISTRY, codec_named
from datagen.store.codecs._planes import FIT_TOKENS
from datagen.store.layout import part
from datagen.store.responses import ResponsesReader
from datagen.store.states import ShardReader, StatesSpec, encode, fit, to_batch
from tests.store.rows import SPEC, prompt_id, response, states_like

WIDE = StatesSpec((2, 30), "post", "BF16", hidden_size=4200, codec="plane")


def shard_of(path: Path, samples: list[NDArray[np.uint16]], spec: StatesSpec = SPEC) -> Path:
    """A sealed shard of `samples`, the first half of each being context."""
    params = fit(spec, samples[0])
    file = ArrowPart(path, spec.schema(params))
    for number, rows in enumerate(samples):
        file.append(
            to_batch(
                file.schema,
                prompt_id=prompt_id(number),
                turn=0,
                input_ids=np.arange(len(rows), dtype=np.int32) + 3,
                n_context=len(rows) // 2,
                encoded=encode(spec, params, rows),
            )
        )
    return file.seal().path


@pytest.mark.parametrize("name", REGISTRY)
@given(
    rows=hnp.arrays(np.uint16, st.tuples(st.integers(1, 7), st.just(6))),
    first=hnp.arrays(np.uint16, st.tuples(st.integers(1, 3), st.just(6))),
    hidden=st.sampled_from([1, 2, 3, 6]),
)
def test_every_bit_pattern_survives_a_lossless_codec(
    name: str, rows: NDArray[np.uint16], first: NDArray[np.uint16], hidden: int
) -> None:
    """NaN with any payload, infinities, denormals and minus zero, under another sample's bias."""
    codec = codec_named(name)
    params = codec.fit(first, hidden)
    exp, sm = codec.encode(rows, hidden, params)
    layers = range(6 // hidden)
    back = codec.decode(exp, sm, len(rows), 6, hidden, params, slice(None), layers)
    if codec.lossless:
        assert np.array_equal(back.reshape(rows.shape), rows)


def test_all_65536_patterns_in_one_sample_survive(tmp_path: Path) -> None:
    rows = np.arange(65536, dtype=np.uint16).reshape(-1, SPEC.width)
    reader = ShardReader(shard_of(tmp_path / "states-000.arrow", [rows]))
    assert np.array_equal(reader.states(0).reshape(rows.shape), rows)


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["layers share frames", "a frame a layer"])
@pytest.mark.parametrize("n_tokens", [1, 512, 1025])
def test_samples_around_the_block_size_come_back(
    tmp_path: Path, spec: StatesSpec, n_tokens: int
) -> None:
    rows = states_like(n_tokens, spec=spec)
    path = shard_of(tmp_path / "states-000.arrow", [rows], spec)
    reader = ShardReader(path)
    assert reader.spec == spec
    assert np.array_equal(reader.states(0).reshape(rows.shape), rows)


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(-1100, 1100), stop=st.none() | st.integers(-1100, 1100),
    layers=st.none() | st.lists(st.integers(0, 3), max_size=5),
)  # fmt: skip
def test_any_range_of_tokens_and_choice_of_layers_is_that_part_of_the_whole(
    shard_1025: tuple[ShardReader, NDArray[np.uint16]],
    start: int,
    stop: int | None,
    layers: list[int] | None,
) -> None:
    reader, rows = shard_1025
    whole = rows.reshape(len(rows), SPEC.n_layers, SPEC.hidden_size)
    chosen = list(range(SPEC.n_layers)) if layers is None else layers
    part_of_it = reader.states(0, tokens=slice(start, stop), layers=layers)
    assert np.array_equal(part_of_it, whole[start:stop][:, chosen])


@pytest.fixture(scope="module")
def shard_1025(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ShardReader, NDArray[np.uint16]]:
    rows = states_like(1025)
    path = tmp_path_factory.mktemp("shard") / "states-000.arrow"
    return ShardReader(shard_of(path, [rows])), rows


@pytest.mark.parametrize(
    ("tokens", "layers"),
    [(slice(None), [4]), (slice(None), [-1]), (slice(0, 9, 2), [0]), (slice(9, 0, -1), None)],
)
def test_layers_and_steps_that_are_not_there_are_refused(
    shard_1025: tuple[ShardReader, NDArray[np.uint16]], tokens: slice, layers: list[int] | None
) -> None:
    with pytest.raises(ValueError, match="layers"):
        shard_1025[0].states(0, tokens=tokens, layers=layers)
    with pytest.raises(IndexError):
        shard_1025[0].states(1)


def test_ids_and_mask_are_read_without_the_states(tmp_path: Path) -> None:
    samples = [states_like(n, seed=n) for n in (5, 8)]
    reader = ShardReader(shard_of(tmp_path / "states-000.arrow", samples))
    assert len(reader) == 2
    columns = reader.columns(1)
    assert (columns.sample_id, columns.prompt_id) == (f"{prompt_id(1)}-0", prompt_id(1))
    assert columns.input_ids.tolist() == list(range(3, 11))
    assert columns.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert reader.stored_bytes(1) < samples[1].nbytes + 64


def test_gaussian_states_shrink_to_the_entropy_of_their_exponents(tmp_path: Path) -> None:
    spec = StatesSpec((2, 15, 27), "post", "BF16", hidden_size=576, codec="plane")
    samples = [states_like(2000, seed=n, spec=spec) for n in range(3)]
    reader = ShardReader(shard_of(tmp_path / "states-000.arrow", samples, spec))
    ratios = [samples[n].nbytes / reader.stored_bytes(n) for n in range(3)]
    assert min(ratios) > 1.49
    # 8 bits raw and 2.545 of exponent are the floor of a gaussian: more would be a wrong count.
    assert max(ratios) < 16 / 10.54


def test_the_first_sample_of_a_shard_gives_the_bias_of_all(tmp_path: Path) -> None:
    samples = [states_like(300, seed=n) for n in range(2)]
    path = shard_of(tmp_path / "states-000.arrow", samples)
    meta = pa.ipc.open_file(str(path)).schema.metadata
    bias = np.frombuffer(base64.b64decode(meta[b"params"]), dtype=np.uint8)
    exponents = (samples[0][:FIT_TOKENS] >> 7 & 0xFF).astype(np.uint8)
    assert np.abs(bias.astype(int) - np.median(exponents, axis=0)).max() <= 1


def test_an_open_shard_is_read_up_to_a_given_end(tmp_path: Path) -> None:
    rows = states_like(40)
    params = fit(SPEC, rows)
    file = ArrowPart(tmp_path / "states-000.arrow", SPEC.schema(params))
    ends = [
        file.append(
            to_batch(
                file.schema, prompt_id=prompt_id(n), turn=0, n_context=3,
                input_ids=np.arange(40, dtype=np.int32), encoded=encode(SPEC, params, rows),
            )
        )
        for n in range(3)
    ]  # fmt: skip
    file.sync()
    for count, end in enumerate(ends, start=1):
        reader = ShardReader(part(file.path), end=end)
        assert len(reader) == count
        assert np.array_equal(reader.states(count - 1).reshape(rows.shape), rows)
    for end in (0, 5, 8, 9, ends[0] - 1, ends[2] + 1):
        with pytest.raises(CorruptFile):
            ShardReader(part(file.path), end=end)
    file.abandon()


def test_an_unknown_codec_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'zip'.*plane"):
        codec_named("zip")


def rewritten(path: Path, metadata: dict[str, str], **columns: pa.Array) -> Path:
    """The shard with metadata or whole columns replaced: well-formed Arrow, wrong content."""
    reader = pa.ipc.open_file(path.read_bytes())
    schema = reader.schema.with_metadata(
        {k.decode(): v.decode() for k, v in reader.schema.metadata.items()} | metadata
    )
    batch = reader.get_batch(0)
    with pa.ipc.new_file(str(path), schema) as writer:
        writer.write_batch(
            pa.record_batch(
                [columns.get(f.name, batch.column(f.name)) for f in reader.schema], schema=schema
            )
        )
    return path


@pytest.mark.parametrize(
    "metadata",
    [{"format": "datagen.states.2"}, {"codec_version": "2"}, {"hidden_size": "17"},
     {"hidden_size": "-16"}, {"hidden_size": "0"}, {"hidden_size": str(2**40)},
     {"boundaries": "1,x"}, {"boundaries": "1"}, {"params": "####"}, {"params": "AAAA"}],
)  # fmt: skip
def test_metadata_that_does_not_fit_the_bytes_is_refused(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    path = rewritten(shard_of(tmp_path / "states-000.arrow", [states_like(9)]), metadata)
    with pytest.raises(CorruptFile, match=r"states-000\.arrow"):
        ShardReader(path).states(0)


ONE = pa.large_list(pa.large_binary())


@pytest.mark.parametrize(
    "columns",
    [
        {"n_tokens": pa.array([8], pa.int32())},
        {"n_tokens": pa.array([-9], pa.int32())},
        {"n_tokens": pa.array([2**31 - 1], pa.int32())},
        {"n_tokens": pa.array([None], pa.int32())},
        {"sm": pa.array([b""], pa.large_binary())},
        {"sm": pa.array([None], pa.large_binary())},
        {"exp": pa.array([[]], ONE)},
        {"exp": pa.array([[None]], ONE)},
        {"exp": pa.array([[b""]], ONE)},
        {"exp": pa.array([[b"not a zstd frame"]], ONE)},
        {"exp": pa.array([[b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8]], ONE)},
        {"exp": pa.array([[b"x", b"y"]], ONE)},
    ],
)
def test_columns_that_contradict_each_other_are_refused_by_row(
    tmp_path: Path, columns: dict[str, pa.Array]
) -> None:
    path = rewritten(shard_of(tmp_path / "states-000.arrow", [states_like(9)]), {}, **columns)
    with pytest.raises(CorruptFile, match="row 0"):
        ShardReader(path).states(0)


@pytest.mark.parametrize("codec", REGISTRY)
def test_a_buffer_cut_anywhere_in_its_last_number_is_refused_or_other_data(
    tmp_path: Path, codec: str
) -> None:
    spec = dataclasses.replace(SPEC, codec=codec)
    raw = shard_of(tmp_path / "states-000.arrow", [states_like(9)], spec).read_bytes()
    ((offset, metadata, body),) = blocks_of(lambda at, n: raw[at : at + n], len(raw)).tolist()
    _, _, buffers = _batch(raw[offset + 8 : offset + metadata], body)
    bad, refused = tmp_path / "bad.arrow", 0
    for place, length in buffers:
        for cut in (1, 4, 7) if length else ():
            changed = bytearray(raw)
            at = raw.index(struct.pack("<qq", place, length), offset)
            changed[at : at + 16] = struct.pack("<qq", place, max(0, length - cut))
            bad.write_bytes(changed)
            try:
                reader = ShardReader(bad)
                reader.states(0)
                reader.raw_plane(0)
                reader.stored_bytes(0)
            except CorruptFile:
                refused += 1
    assert refused > 6


def test_a_file_that_is_no_shard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states-000.arrow"
    for content in (b"", b"ARROW1\0\0", b"x" * 5000):
        path.write_bytes(content)
        with pytest.raises(CorruptFile):
            ShardReader(path)
    with pytest.raises(CorruptFile, match="No such file"):
        ShardReader(tmp_path / "absent.arrow")
    with pytest.raises(CorruptFile, match="no datagen"):
        ResponsesReader(shard_of(path, [states_like(4)]))


@pytest.mark.parametrize("files", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_flipped_bytes_give_an_error_or_data_but_never_a_crash(tmp_path: Path, files: int) -> None:
    """Damaged files, in a process of its own with little memory: an abort would end it."""
    shard = shard_of(tmp_path / "states-000.arrow", [states_like(n, seed=n) for n in (9, 20)])
    file = ArrowPart(tmp_path / "responses-000.arrow", responses.SCHEMA)
    for number in range(2):
        file.append(responses.to_batch([response(number)]))
    answers = file.seal().path
    code = f"""
        import random, resource, sys
        from pathlib import Path
        from datagen.errors import CorruptFile
        from datagen.store.responses import ResponsesReader
        from datagen.store.states import ShardReader
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        rng, caught = random.Random(1), 0
        for path, reader in (({str(shard)!r}, ShardReader), ({str(answers)!r}, ResponsesReader)):
            raw = Path(path).read_bytes()
            for attempt in range({files}):
                bad = bytearray(raw)
                for _ in range(rng.choice((1, 1, 1, 4))):
                    bad[rng.randrange(len(bad))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
                target = Path(path + ".bad")
                target.write_bytes(bad)
                try:
                    opened = reader(target)
                    for row in range(min(len(opened), 5)):
                        if reader is ShardReader:
                            opened.columns(row), opened.states(row), opened.stored_bytes(row)
                        else:
                            opened[row]
                except CorruptFile:
                    caught += 1
        print(caught)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    assert int(done.stdout) > files // 20


def test_a_shard_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = shard_of(tmp_path / "states-000.arrow", [states_like(9)])
    raw, rng = path.read_bytes(), random.Random(5)
    for length in sorted(rng.sample(range(len(raw)), 200)):
        path.write_bytes(raw[:length])
        with pytest.raises(CorruptFile):
            ShardReader(path)
