"""states-NNN.arrow: a shard of samples with their hidden states.

Arrow IPC file, no IPC compression, one record batch per sample, so that one sample is one mmap read.
    sample_id string, prompt_id string, n_tokens int32
    input_ids large_list<int32> [n]      context and response, the engine's ids
    loss_mask large_list<int8> [n]       0 over the context, 1 over the response
    exp       large_list<large_binary>   the codec's frames
    sm        large_binary               the codec's raw plane
Schema metadata: format, codec, codec_version, boundaries, final_norm, dtype, hidden_size, params
(base64; for `plane` the exponent bias per [layer, channel]). Row i of the states is token i; the
layers are the boundaries in order, then the final state.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datagen.errors import ConfigError, CorruptFile
from datagen.store.arrow_part import open_batches
from datagen.store.codecs import Encoded, codec_named

FORMAT = "datagen.states.1"
FIELDS = [
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("n_tokens", pa.int32(), nullable=False),
    pa.field("input_ids", pa.large_list(pa.int32()), nullable=False),
    pa.field("loss_mask", pa.large_list(pa.int8()), nullable=False),
    pa.field("exp", pa.large_list(pa.large_binary()), nullable=False),
    pa.field("sm", pa.large_binary(), nullable=False),
]


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
        return pa.schema(
            FIELDS,
            metadata={
                "format": FORMAT,
                "codec": self.codec,
                "codec_version": str(codec_named(self.codec).version),
                "boundaries": ",".join(map(str, self.boundaries)),
                "final_norm": self.final_norm,
                "dtype": self.dtype,
                "hidden_size": str(self.hidden_size),
                "params": base64.b64encode(params).decode(),
            },
        )


def fit(spec: StatesSpec, rows_TW: NDArray[np.uint16]) -> bytes:
    """Codec parameters for a shard that begins with these rows."""
    return codec_named(spec.codec).fit(rows_TW, spec.hidden_size)


def encode(spec: StatesSpec, params: bytes, rows_TW: NDArray[np.uint16]) -> Encoded:
    """Encode one sample; pure and thread-safe."""
    return Encoded(*codec_named(spec.codec).encode(rows_TW, spec.hidden_size, params))


def to_batch(
    schema: pa.Schema,
    *,
    prompt_id: str,
    turn: int,
    input_ids: NDArray[np.int32],
    n_context: int,
    encoded: Encoded,
) -> pa.RecordBatch:
    """One sample as a record batch."""
    mask = np.zeros(len(input_ids), dtype=np.int8)
    mask[n_context:] = 1
    offsets = [0, len(input_ids)]
    sm = pa.Array.from_buffers(
        pa.large_binary(),
        1,
        [
            None,
            pa.py_buffer(np.array([0, len(encoded.sm)], dtype=np.int64)),
            pa.py_buffer(encoded.sm),
        ],
    )
    columns: list[pa.Array] = [
        pa.array([f"{prompt_id}-{turn}"]),
        pa.array([prompt_id]),
        pa.array([len(input_ids)], type=pa.int32()),
        pa.LargeListArray.from_arrays(offsets, pa.array(input_ids, type=pa.int32())),
        pa.LargeListArray.from_arrays(offsets, pa.array(mask, type=pa.int8())),
        pa.LargeListArray.from_arrays(
            [0, len(encoded.exp)], pa.array(encoded.exp, type=pa.large_binary())
        ),
        sm,
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


class ShardReader:
    """Random access to the samples of a shard, sealed or still open (`.part`)."""

    def __init__(self, path: Path, *, end: int | None = None) -> None:
        self._path = path
        self._batches = open_batches(path, end=end)
        self.spec, self._params = self._parse(self._batches.schema)

    def __len__(self) -> int:
        return len(self._batches)

    def columns(self, index: int) -> SampleColumns:
        """Ids and mask of sample `index`; the states are not read. Raises CorruptFile."""
        batch = self._batch(index)
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

    def states(
        self, index: int, *, tokens: slice = slice(None), layers: Sequence[int] | None = None
    ) -> NDArray[np.uint16]:
        """Bit patterns uint16 [tokens, layers, H] of sample `index`; raises CorruptFile.

        `tokens`: a slice without a step; `layers`: positions among the boundaries and the final
        state, which is the last. ValueError when they name no token or layer there can be.
        """
        spec = self.spec
        wanted = range(spec.n_layers) if layers is None else layers
        if any(not 0 <= layer < spec.n_layers for layer in wanted) or tokens.step not in (None, 1):
            raise ValueError(f"layers {list(wanted)} of {spec.n_layers}, tokens {tokens}")
        batch = self._batch(index)
        try:
            n_tokens = int(batch.column("n_tokens")[0].as_py())
            frames = [memoryview(f.as_buffer()) for f in batch.column("exp")[0].values]
            return codec_named(spec.codec).decode(
                frames,
                memoryview(batch.column("sm")[0].as_buffer()),
                n_tokens,
                spec.width,
                spec.hidden_size,
                self._params,
                tokens,
                wanted,
            )
        except (pa.ArrowException, ValueError, IndexError, TypeError) as e:
            raise self._corrupt(index, str(e)) from e

    def stored_bytes(self, index: int) -> int:
        """Encoded size of the states of a sample."""
        batch = self._batch(index)
        exp = sum(len(f.as_buffer()) for f in batch.column("exp")[0].values)
        return exp + len(batch.column("sm")[0].as_buffer())

    def _batch(self, index: int) -> pa.RecordBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = self._batches[index]
        if batch.num_rows != 1:
            raise self._corrupt(index, f"a batch of {batch.num_rows} rows")
        missing = [c for c in batch.schema.names if batch.column(c).null_count]
        if missing:
            raise self._corrupt(index, f"{missing[0]} is missing")
        return batch

    def _corrupt(self, index: int, what: str) -> CorruptFile:
        return CorruptFile(f"row {index}: {what}", where=self._path, fix="run `datagen verify`")

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
            version = codec_named(spec.codec).version
            if int(meta["codec_version"]) != version:
                raise ValueError(
                    f"{spec.codec} version {meta['codec_version']}, this reads {version}"
                )
            if spec.hidden_size < 1 or not schema.remove_metadata().equals(pa.schema(FIELDS)):
                raise ValueError("other columns than a shard's")
        except (KeyError, ValueError, ConfigError) as e:
            raise CorruptFile(
                f"no shard this can read: {e}", where=self._path, fix="run `datagen verify`"
            ) from e
        return spec, params
