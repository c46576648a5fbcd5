"""responses-NNN.arrow: what the target answered, one record batch per commit.

Columns (SCHEMA): ids are the engine's, int32; `text` is for people and for later turns, never the
source of ids; times in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datagen.errors import CorruptFile
from datagen.store.arrow_part import Rows, open_batches
from datagen.store.columns import id_column, number_column, text_column

FORMAT = "datagen.responses.1"
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("context_ids", pa.large_list(pa.int32()), nullable=False),
        pa.field("response_ids", pa.large_list(pa.int32()), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("stop_reason_detail", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("num_retractions", pa.int32(), nullable=False),
        pa.field("spec_verify_ct", pa.int32()),
        pa.field("seed", pa.int64()),
        pa.field("endpoint", pa.string(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("queue_s", pa.float64(), nullable=False),
        pa.field("server_s", pa.float64(), nullable=False),
    ],
    metadata={"format": FORMAT},
)


@dataclass(frozen=True, slots=True)
class Response:
    """One generation. `context_ids`, `response_ids`: int32 [n]; the stop token is included."""

    prompt_id: str
    turn: int
    context_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    text: str
    finish_reason: str
    stop_reason_detail: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    spec_verify_ct: int | None
    seed: int | None
    endpoint: str
    attempts: int
    queue_s: float
    server_s: float

    @property
    def sample_id(self) -> str:
        """`<prompt_id>-<turn>`."""
        return f"{self.prompt_id}-{self.turn}"


FIELDS = tuple(f.name for f in fields(Response))


def to_batch(responses: Sequence[Response]) -> pa.RecordBatch:
    """Rows in SCHEMA. Lone surrogates, which Arrow's UTF-8 cannot hold, become U+FFFD."""
    return pa.record_batch([_column(field, responses) for field in SCHEMA], schema=SCHEMA)


def _column(field: pa.Field, responses: Sequence[Response]) -> pa.Array:
    values = [getattr(r, field.name) for r in responses]
    if field.name in ("context_ids", "response_ids"):
        return id_column(values)
    if field.name == "text":
        return text_column(field.type, [_arrow_text(text) for text in values])
    if pa.types.is_string(field.type):
        return text_column(field.type, values)
    return number_column(field.type, values)


def _arrow_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def from_batch(batch: pa.RecordBatch, row: int = 0) -> Response:
    """The response at `row` of a batch. Raises ValueError when a cell is not what SCHEMA says."""
    values: dict[str, Any] = {}
    for name in FIELDS:
        cell = batch.column(name)[row]
        if not cell.is_valid and not SCHEMA.field(name).nullable:
            raise ValueError(f"{name} is missing")
        if name in ("context_ids", "response_ids"):
            values[name] = np.array(cell.values.to_numpy(), dtype=np.int32)
        else:
            values[name] = cell.as_py()
    response = Response(**values)
    if batch.column("sample_id")[row].as_py() != response.sample_id:
        raise ValueError("sample_id is not prompt_id and turn")
    return response


class ResponsesReader:
    """Random access to the responses of a file: sealed, or with `end` still open (`.part`)."""

    def __init__(self, path: Path, *, end: int | None = None) -> None:
        self._path = path
        batches = open_batches(path, end=end)
        if not batches.schema.equals(SCHEMA, check_metadata=True):
            raise CorruptFile(f"the file is no {FORMAT}", where=path, fix="run `datagen verify`")
        self._rows = Rows(batches)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Response:
        """Response `index`; raises CorruptFile naming file and row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            return from_batch(self._rows[index])
        except (pa.ArrowException, ValueError, TypeError) as e:
            raise CorruptFile(
                f"row {index}: {e}", where=self._path, fix="run `datagen verify`"
            ) from e

    def __iter__(self) -> Iterator[Response]:
        return (self[index] for index in range(len(self)))
