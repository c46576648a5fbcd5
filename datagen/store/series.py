"""The numbered files of one kind in a partition: one open, the others sealed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from datagen.errors import CorruptFile
from datagen.store.arrow_part import (
    ArrowPart,
    Rows,
    SealedFile,
    examine_sealed,
    open_batches,
    recover,
)
from datagen.store.layout import part
from datagen.store.seal import FileSummary


class Series:
    """Rows go to the open file; `roll` seals it and the next row opens another."""

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._open: ArrowPart | None = None
        self._sealed: dict[int, SealedFile] = {}
        self._rows: dict[int, int] = {}
        self.tokens: Counter[int] = Counter()
        """File number -> tokens of its rows."""
        self.number = 0
        """Number of the file that takes the next row."""

    def recover(self, present: list[int], journaled: dict[int, list[int]]) -> None:
        """Bring the files to what the journal says: file number -> end offset of each row.

        Raises CorruptFile when a file holds less than was promised.
        """
        for number in sorted({*present, *journaled}):
            ends = journaled.get(number, [])
            rows, end = len(ends), ends[-1] if ends else 0
            path = self._path_of(number)
            if part(path).exists():
                sealed = recover(path, rows=rows, end=end)
                if sealed is not None:
                    self._sealed[number] = sealed
            if path.exists():
                found = len(Rows(open_batches(path)))
                if found != rows:
                    raise CorruptFile(
                        f"{found} rows, the journal promises {rows}",
                        where=path,
                        fix="run `datagen repair`",
                    )
                self._rows[number] = rows
            elif rows:
                raise CorruptFile(
                    f"the file is gone, the journal promises {rows} rows of it",
                    where=path,
                    fix="run `datagen repair`",
                )
        self.number = max([-1, *self._rows]) + 1

    def append(
        self,
        schema: Callable[[], pa.Schema],
        batch: Callable[[pa.Schema], pa.RecordBatch],
        tokens: int,
    ) -> tuple[int, int]:
        """Write one batch, opening a file with `schema` if none is.

        Returns the number of its first row, and its end offset.
        """
        if self._open is None:
            self._open = ArrowPart(self._path_of(self.number), schema())
        row = self._open.rows
        end = self._open.append(batch(self._open.schema))
        self.tokens[self.number] += tokens
        return row, end

    def sync(self) -> None:
        """Wait until every row is on disk."""
        if self._open is not None:
            self._open.sync()

    @property
    def open_rows(self) -> int:
        """Rows in the open file; 0 when none is open."""
        return self._open.rows if self._open is not None else 0

    @property
    def open_bytes(self) -> int:
        """Bytes in the open file; 0 when none is open."""
        return self._open.n_bytes if self._open is not None else 0

    def roll(self) -> None:
        """Seal the open file."""
        if self._open is not None:
            sealed = self._sealed[self.number] = self._open.seal()
            self._rows[self.number] = sealed.rows
            self._open = None
            self.number += 1

    def abandon(self) -> None:
        """Close the open file as it is."""
        if self._open is not None:
            self._open.abandon()
            self._open = None

    def files(self) -> list[FileSummary]:
        """The sealed files, in order."""
        return [self._file(number) for number in sorted(self._rows)]

    def _file(self, number: int) -> FileSummary:
        known = self._sealed.get(number)
        if known is None:  # sealed by an earlier process
            known = examine_sealed(self._path_of(number))
        return FileSummary(
            name=known.path.name,
            rows=known.rows,
            tokens=self.tokens[number],
            n_bytes=known.n_bytes,
            sha256=known.sha256,
            row_ends=known.row_ends,
            row_xxh3=known.row_xxh3,
        )
