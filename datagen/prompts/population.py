"""All candidates of a mix as columns of numbers, in one canonical order that no file order changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from datagen.prompts.candidates import Chunk
from datagen.prompts.intake import Intake
from datagen.prompts.mix import Mix

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Population:
    """n candidates, ordered by source (held-out first), longer text first, then content.

    The order decides which of several equal prompts stays. `place` leads back to the texts:
    [n, 2] int64 of (chunk, row). `rank`: index of the source in `mix.all_sources`.
    """

    chunks: tuple[Chunk, ...]
    place: I64
    rank: npt.NDArray[np.int64]
    first_8: npt.NDArray[np.uint64]
    exact_key: npt.NDArray[np.uint64]
    tools_key: npt.NDArray[np.uint64]
    n_turns: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, rows: I64, *names: str) -> list[dict[str, Any]]:
        """Columns of some candidates, in the order of `rows`; each chunk is opened once."""
        taken: list[dict[str, Any]] = [{}] * len(rows)
        for chunk, positions in self.by_chunk(rows):
            inside = self.place[rows[positions], 1]
            for position, row in zip(
                positions, self.chunks[chunk].take(inside, *names), strict=True
            ):
                taken[position] = row
        return taken

    def by_chunk(self, rows: I64) -> list[tuple[int, I64]]:
        """(chunk, positions in `rows` that lie in it), for every chunk that has some."""
        chunk_of = self.place[rows, 0]
        order = np.argsort(chunk_of, kind="stable")
        cuts = np.flatnonzero(np.diff(chunk_of[order])) + 1
        return [(int(chunk_of[part[0]]), part) for part in np.split(order, cuts) if len(part)]


def gather(mix: Mix, intakes: Sequence[Intake]) -> Population:
    """Every candidate of the intakes, in canonical order."""
    ranks = {source.name: rank for rank, source in enumerate(mix.all_sources)}
    chunks: list[Chunk] = []
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    for intake in intakes:
        rank_of = np.array([ranks[s.name] for s in intake.sources], dtype=np.int64)
        for chunk in intake.chunks:
            batch = chunk.columns(
                "source", "first_8", "exact_key", "tools_key", "tie", "chars", "n_turns"
            )
            plain = {name: batch.column(name).to_numpy() for name in batch.schema.names}
            n = batch.num_rows
            plain["rank"] = rank_of[plain.pop("source").astype(np.int64)]
            plain["chunk"] = np.full(n, len(chunks), dtype=np.int64)
            plain["row"] = np.arange(n, dtype=np.int64)
            for name, column in plain.items():
                columns.setdefault(name, []).append(column)
            chunks.append(chunk)
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.lexsort(
        (whole["tie"], whole["first_8"], -whole["chars"].astype(np.int64), whole["rank"])
    )
    return Population(
        chunks=tuple(chunks),
        place=np.stack([whole["chunk"][order], whole["row"][order]], axis=1),
        rank=whole["rank"][order],
        first_8=whole["first_8"][order],
        exact_key=whole["exact_key"][order],
        tools_key=whole["tools_key"][order],
        n_turns=whole["n_turns"][order].astype(np.int64),
    )
