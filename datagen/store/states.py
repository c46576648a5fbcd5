"""states-NNN.arrow: a shard of samples with their hidden states.

Arrow IPC file, no IPC compression, one record batch per sample, so that one sample is one mmap read.
    sample_id string, prompt_id string, n_tokens int32
    input_ids large_list<int32> [n]      context and response, the engine's ids
    loss_mask large_list<int8> [n]       0 over the context, 1 over the response
    exp       large_list<large_binary>   the codec's frames
    sm        large_binary               the codec's raw plane
The last two have the types that their codec gives them (`store/codecs/`): `ipc-zstd` keeps plain bytes
that Arrow compresses, and says so in the metadata `ipc_compression`.
Schema metadata: format, codec, codec_version, boundaries, final_norm, dtype, hidden_size, params
(base64; for `plane` the exponent bias per [layer, channel]). Row i of the states is token i; the
layers are the boundaries in order, then the final state.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datagen.errors import ConfigError, CorruptFile
from datagen.store import arrow_row
from datagen.store.arrow_batches import open_batches
from datagen.store.arrow_part import COMPRESSION
from datagen.store.arrow_row import Buffers
from datagen.store.codecs import Encoded, Frames, codec_named
from datagen.store.columns import IDS, list_of, number_column, text_column
from datagen.store.files import Location

FORMAT = "datagen.states.1"
MASK = pa.large_list(pa.int8())
SAMPLE_FIELDS = [
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("n_tokens", pa.int32(), nullable=False),
    pa.field("input_ids", IDS, nullable=False),
    pa.field("loss_mask", MASK, nullable=False),
]
SAMPLE_COLUMNS = [field.name for field in SAMPLE_FIELDS]
STATES_COLUMNS = ["sample_id", "n_tokens", "exp", "sm"]
MAX_TOKEN_ID = 1 << 22  # no vocabulary is near it: a larger id is damage, and would size an array
MAX_HIDDEN, MAX_BOUNDARIES = 1 << 20, 1024  # beyond any model: a larger number is damage


@dataclass(frozen=True, slots=True)
class StatesSpec:
    """What the rows of a run are: K boundaries and the final state, each of `hidden_size`."""

    boundaries: tuple[int, ...]
    final_norm: str
    dtype: str
    hidden_size: int
    codec: str

    @property
    def n_layers(self) -> int:
        """Boundaries and the final state."""
        return len(self.boundaries) + 1

    @property
    def width(self) -> int:
        """Values per token."""
        return self.n_layers * self.hidden_size

    def schema(self, params: bytes) -> pa.Schema:
        """The schema of a shard whose codec learnt `params`."""
        codec = codec_named(self.codec)
        metadata = {
            "format": FORMAT,
            "codec": self.codec,
            "codec_version": str(codec.version),
            "boundaries": ",".join(map(str, self.boundaries)),
            "final_norm": self.final_norm,
            "dtype": self.dtype,
            "hidden_size": str(self.hidden_size),
            "params": base64.b64encode(params).decode(),
        }
        if codec.ipc_compression:
            metadata[COMPRESSION] = codec.ipc_compression
        return pa.schema([*SAMPLE_FIELDS, *codec.fields], metadata=metadata)


def fit(spec: StatesSpec, rows_TW: NDArray[np.uint16]) -> bytes:
    """Codec parameters for a shard that begins with these rows."""
    return codec_named(spec.codec).fit(rows_TW, spec.hidden_size)


def encode(spec: StatesSpec, params: bytes, rows_TW: NDArray[np.uint16]) -> Encoded:
    """Encode one sample; pure and thread-safe."""
    exp, sm = codec_named(spec.codec).encode(rows_TW, spec.hidden_size, params)
    return Encoded(exp, sm, params, rows_TW.shape)


def to_batch(
    schema: pa.Schema,
    *,
    prompt_id: str,
    turn: int,
    input_ids: NDArray[np.int32],
    n_context: int,
    encoded: Encoded,
) -> pa.RecordBatch:
    """One sample as a record batch. ValueError when it was encoded for another shard."""
    if schema.metadata[b"params"] != base64.b64encode(encoded.params):
        raise ValueError("the sample was encoded with other parameters than its shard's")
    mask = np.zeros(len(input_ids), dtype=np.int8)
    mask[n_context:] = 1
    columns: list[pa.Array] = [
        text_column(pa.string(), [f"{prompt_id}-{turn}"]),
        text_column(pa.string(), [prompt_id]),
        number_column(pa.int32(), [len(input_ids)]),
        list_of(IDS, np.ascontiguousarray(input_ids, dtype=np.int32)),
        list_of(MASK, mask),
        *codec_named(schema.metadata[b"codec"].decode()).arrays(encoded.exp, encoded.sm),
    ]
    return pa.record_batch(columns, schema=schema)


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """A sample without its states. `input_ids` int32 [n], `loss_mask` int8 [n]."""

    sample_id: str
    prompt_id: str
    n_tokens: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """All samples of a shard, one after the other: `input_ids` int32, `loss_mask` int8, both [total].

    `n_tokens` int64 [samples].
    """

    n_tokens: NDArray[np.int64]
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]

    def supervised_counts(self) -> NDArray[np.int64]:
        """Occurrences by token id where the mask is 1."""
        return np.bincount(self.input_ids[self.loss_mask != 0])


class _Row(NamedTuple):
    """A sample as it is stored."""

    sample_id: str
    n_tokens: int
    exp: Frames
    sm: memoryview


class ShardReader:
    """Random access to the samples of a shard, sealed or still open (`.part`)."""

    def __init__(self, path: Location, *, end: int | None = None) -> None:
        self._path = path
        self._batches = open_batches(path, end=end)
        self.spec, self._params = self._parse(self._batches.schema)
        self._codec = codec_named(self.spec.codec)
        self._places, self._ends = arrow_row.places_of(self._batches.schema, STATES_COLUMNS)

    def __len__(self) -> int:
        return len(self._batches)

    def columns(self, index: int, *, of: tuple[str, int] | None = None) -> SampleColumns:
        """Ids and mask of sample `index`; the states are not read. Raises CorruptFile."""
        narrow = self._batches.columns(self._within(index), SAMPLE_COLUMNS)
        batch = self._complete(index, narrow, of)
        try:
            return SampleColumns(
                sample_id=batch.column("sample_id")[0].as_py(),
                prompt_id=batch.column("prompt_id")[0].as_py(),
                n_tokens=batch.column("n_tokens")[0].as_py(),
                input_ids=batch.column("input_ids")[0].values.to_numpy(),
                loss_mask=batch.column("loss_mask")[0].values.to_numpy(),
            )
        except (pa.ArrowException, ValueError, IndexError) as e:
            raise self._corrupt(index, str(e)) from e

    def token_columns(self) -> TokenColumns:
        """Ids and masks of all samples at once, states not read: quick. Raises CorruptFile."""
        table = self._batches.table(["input_ids", "loss_mask"])
        try:
            ids, mask = (_joined(column) for column in table.combine_chunks().columns)
            lengths, of_mask = (np.diff(column.offsets.to_numpy()) for column in (ids, mask))
            if not np.array_equal(lengths, of_mask):
                raise ValueError("ids and masks differ in length")
            columns = TokenColumns(lengths, ids.flatten().to_numpy(), mask.flatten().to_numpy())
            if len(columns.input_ids) and not (
                0 <= columns.input_ids.min() <= columns.input_ids.max() < MAX_TOKEN_ID
            ):
                raise ValueError("a token id is beyond any vocabulary")
        except (pa.ArrowException, ValueError) as e:
            raise CorruptFile(str(e), where=self.where, fix="run `datagen verify`") from e
        return columns

    def states(
        self,
        index: int,
        *,
        tokens: slice = slice(None),
        layers: Sequence[int] | None = None,
        of: tuple[str, int] | None = None,
    ) -> NDArray[np.uint16]:
        """Bit patterns uint16 [tokens, layers, H] of sample `index`; raises CorruptFile.

        `tokens`: a slice without a step; `layers`: positions among the boundaries and the final
        state, which is the last. ValueError when they name no token or layer there can be.
        `of`: the id and the tokens that the row must have.
        """
        spec = self.spec
        wanted = range(spec.n_layers) if layers is None else layers
        if not all(map(range(spec.n_layers).__contains__, wanted)) or tokens.step not in (None, 1):
            raise ValueError(f"layers {list(wanted)} of {spec.n_layers}, tokens {tokens}")
        covered = tokens.stop is None or (of is not None and tokens.stop >= of[1])
        whole = layers is None and tokens.start in (None, 0) and covered
        row = self._row(index, of, whole=whole)
        try:
            return self._codec.decode(
                row.exp, row.sm, row.n_tokens, spec.width, spec.hidden_size, self._params,
                tokens, wanted,
            )  # fmt: skip
        except (ValueError, IndexError) as e:
            raise self._corrupt(index, str(e)) from e

    def raw_plane(self, index: int, *, of: tuple[str, int] | None = None) -> NDArray[np.uint8]:
        """uint8 [n, bytes a token]: the sign and mantissa plane as its codec keeps it.

        A view of the mapped file, not a copy, unless Arrow compressed the shard. Raises CorruptFile.
        """
        row = self._row(index, of)
        try:
            plane = np.frombuffer(row.sm, dtype=np.uint8)
            return plane.reshape(row.n_tokens, len(plane) // row.n_tokens)
        except (ValueError, ZeroDivisionError) as e:
            raise self._corrupt(index, str(e)) from e

    def stored_bytes(self, index: int) -> int:
        """Encoded size of the states of a sample; with its ids where Arrow compresses them together."""
        if self._codec.ipc_compression:
            return self._batches.body_bytes(self._within(index))
        row = self._row(index)
        return row.exp.n_bytes + len(row.sm)

    def _within(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index

    def _row(self, index: int, of: tuple[str, int] | None = None, *, whole: bool = False) -> _Row:
        """What is stored of a sample's states. Arrow makes a batch of it only where it must inflate."""
        flat: Buffers | None = None
        if not self._codec.ipc_compression:
            flat = self._batches.buffers(self._within(index), self._places, whole=whole)
        try:
            if flat is None:
                batch = self._batches.columns(self._within(index), STATES_COLUMNS)
                columns = self._complete(index, batch).columns
                flat = [buffer for column in columns for buffer in arrow_row.buffers_of(column)]
            a, b, c = self._ends
            row = _Row(
                arrow_row.text(flat[:a]),
                arrow_row.number(flat[a:b]),
                *self._codec.stored(flat[b:c], flat[c:]),
            )
        except (pa.ArrowException, ValueError, struct.error) as e:
            raise self._corrupt(index, str(e)) from e
        self._require(index, row[:2], of)
        return row

    def _complete(
        self, index: int, batch: pa.RecordBatch, of: tuple[str, int] | None = None
    ) -> pa.RecordBatch:
        if batch.num_rows != 1:
            raise self._corrupt(index, f"a batch of {batch.num_rows} rows")
        for number, column in enumerate(batch.columns):
            if column.null_count:
                raise self._corrupt(index, f"{batch.schema.names[number]} is missing")
        if of is not None:
            found = (batch.column("sample_id")[0].as_py(), batch.column("n_tokens")[0].as_py())
            self._require(index, found, of)
        return batch

    def _require(self, index: int, found: tuple[str, int], of: tuple[str, int] | None) -> None:
        if of is not None and found != of:
            raise self._corrupt(
                index,
                f"sample {found[0]} of {found[1]} tokens, the journal has {of[0]} of {of[1]}",
            )

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self._path)

    def _corrupt(self, index: int, what: str) -> CorruptFile:
        return CorruptFile(f"row {index}: {what}", where=self.where, fix="run `datagen verify`")

    def _parse(self, schema: pa.Schema) -> tuple[StatesSpec, bytes]:
        meta: dict[str, Any] = {
            k.decode(errors="replace"): v.decode(errors="replace")
            for k, v in (schema.metadata or {}).items()
        }
        try:
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}, this reads {FORMAT}")
            spec = StatesSpec(
                boundaries=tuple(int(b) for b in meta["boundaries"].split(",")),
                final_norm=meta["final_norm"],
                dtype=meta["dtype"],
                hidden_size=int(meta["hidden_size"]),
                codec=meta["codec"],
            )
            params = base64.b64decode(meta["params"], validate=True)
            codec = codec_named(spec.codec)
            if int(meta["codec_version"]) != codec.version:
                raise ValueError(
                    f"{spec.codec} version {meta['codec_version']}, this reads {codec.version}"
                )
            if not 0 < spec.hidden_size <= MAX_HIDDEN or len(spec.boundaries) > MAX_BOUNDARIES:
                raise ValueError(f"{len(spec.boundaries)} boundaries of {spec.hidden_size}")
            if not schema.remove_metadata().equals(pa.schema([*SAMPLE_FIELDS, *codec.fields])):
                raise ValueError("other columns than a shard's")
        except (KeyError, ValueError, ConfigError) as e:
            raise CorruptFile(
                f"no shard this can read: {e}", where=self.where, fix="run `datagen verify`"
            ) from e
        return spec, params


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """One array of all chunks. Raises ValueError when a cell is missing."""
    if column.null_count:
        raise ValueError("a cell is missing")
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
