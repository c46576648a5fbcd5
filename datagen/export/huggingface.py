"""A dataset directory that `datasets.load_dataset` reads: Parquet by split, and a card.

<out>/README.md                 card: where the data is, what it is, licences
<out>/data/<split>-<n>.parquet  SCHEMA; `states` only on request: row-major [n_tokens, K+1, H] of
                                the dtype the card names, little-endian
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from datagen.export.card import Card
from datagen.export.samples import Source

FILE_BYTES = 400 << 20
GROUP_BYTES = 32 << 20
FIELDS = [
    pa.field("sample_id", pa.string()),
    pa.field("prompt_id", pa.string()),
    pa.field("turn", pa.int32()),
    pa.field("source", pa.string()),
    pa.field("licence", pa.string()),
    pa.field("category", pa.string()),
    pa.field("language", pa.string()),
    pa.field("messages", pa.large_string()),
    pa.field("tools", pa.large_string()),
    pa.field("response", pa.large_string()),
    pa.field("finish_reason", pa.string()),
    pa.field("input_ids", pa.large_list(pa.int32())),
    pa.field("loss_mask", pa.large_list(pa.int8())),
]
STATES = pa.field("states", pa.large_binary())


class _Files:
    """The Parquet files of a split: rows gathered into groups, groups into files of bounded size."""

    def __init__(self, folder: Path, split: str, schema: pa.Schema) -> None:
        self._folder, self._split, self._schema = folder, split, schema
        self._rows: list[dict[str, Any]] = []
        self._gathered = self._written = self._number = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, row: dict[str, Any], n_bytes: int) -> None:
        self._rows.append(row)
        self._gathered += n_bytes
        if self._gathered >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            path = self._folder / f"{self._split}-{self._number:05d}.parquet"
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._written += self._gathered
        self._rows, self._gathered = [], 0
        if self._written >= FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._written, self._number = None, 0, self._number + 1

    def close(self) -> None:
        self._flush()
        self._close_file()


def export_huggingface(
    source: Source, splits: list[str], out: Path, *, with_states: bool = False
) -> int:
    """Fill `out`; returns samples written. Raises CorruptFile."""
    schema = pa.schema([*FIELDS, STATES] if with_states else FIELDS)
    (out / "data").mkdir()
    card = Card(source.manifest, with_states=with_states)
    for split in splits:
        files = _Files(out / "data", split, schema)
        for row, n_bytes in _rows(source, split, with_states=with_states):
            files.add(row, n_bytes)
            card.count(split, str(row["source"]), str(row["licence"]), len(row["input_ids"]))
        files.close()
    (out / "README.md").write_text(card.text(), encoding="utf-8")
    return card.samples


def _rows(source: Source, split: str, *, with_states: bool) -> Iterator[tuple[dict[str, Any], int]]:
    for prompt, answer, columns, shard, at in source.with_responses(split):
        row: dict[str, Any] = {
            "sample_id": columns.sample_id, "prompt_id": columns.prompt_id, "turn": answer.turn,
            "source": prompt.source, "licence": prompt.licence, "category": prompt.category,
            "language": prompt.language, "messages": prompt.messages, "tools": prompt.tools,
            "response": answer.text, "finish_reason": answer.finish_reason,
            "input_ids": columns.input_ids, "loss_mask": columns.loss_mask,
        }  # fmt: skip
        n_bytes = len(answer.text) + len(prompt.messages) + 5 * columns.n_tokens
        if with_states:
            row["states"] = shard.states(at).tobytes()
            n_bytes += len(row["states"])
        yield row, n_bytes
