"""The selected prompts as the rows of a plan, read from the cache as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from datagen.errors import PromptDataError
from datagen.prompts.identity import prompt_id_of_parts, set_digest
from datagen.prompts.mix import Mix
from datagen.prompts.population import I64, Population
from datagen.prompts.report import PlanReport
from datagen.store.plan import PlannedPrompt

ROWS_AT_A_TIME = 32_768


@dataclass(frozen=True)
class PlannedRows:
    """n prompts in plan order; iterate as often as needed. All arrays are [n]."""

    mix: Mix
    population: Population
    rows: I64
    tokens: npt.NDArray[np.int32]
    heldout: npt.NDArray[np.bool_]
    partitions: I64
    thinking: npt.NDArray[np.bool_] | None
    answers: list[int]
    """Most new tokens, by rank of source."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_turns(self) -> I64:
        """Samples that each prompt gives, [n]."""
        return self.population.n_turns[self.rows]

    @cached_property
    def prompt_ids(self) -> list[str]:
        """Ids in plan order."""
        return [
            prompt_id_of_parts(row["messages"], row["tools"], self._thinking_of(position))
            for position, row in self._texts("messages", "tools")
        ]

    def __iter__(self) -> Iterator[PlannedPrompt]:
        sources = self.mix.all_sources
        for i, row in self._texts("messages", "tools", "category", "language", "licence"):
            rank = int(self.population.rank[self.rows[i]])
            yield PlannedPrompt(
                prompt_id=self.prompt_ids[i],
                messages=row["messages"],
                tools=row["tools"],
                thinking=self._thinking_of(i),
                split="heldout" if self.heldout[i] else "train",
                n_turns=int(self.population.n_turns[self.rows[i]]),
                prompt_tokens=int(self.tokens[i]),
                max_new_tokens=self.answers[rank],
                source=sources[rank].name,
                category=row["category"],
                language=row["language"],
                licence=row["licence"],
                partition=int(self.partitions[i]),
            )

    def enter_splits(self, report: PlanReport) -> None:
        """Write both splits' sizes and digests into the report.

        Raises PromptDataError if a prompt is in the plan twice: that would be a defect here.
        """
        ids = self.prompt_ids
        if len(set(ids)) != len(ids):
            raise PromptDataError("a prompt is in the plan twice", where=self.mix.path)
        for split, members in (("heldout", self.heldout), ("train", ~self.heldout)):
            report.splits[split] = {
                "prompts": int(members.sum()),
                "samples": int(self.n_turns[members].sum()),
            }
            report.digests[split] = set_digest([ids[i] for i in np.flatnonzero(members)])

    def _thinking_of(self, position: int) -> bool | None:
        return None if self.thinking is None else bool(self.thinking[position])

    def _texts(self, *names: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for start in range(0, len(self.rows), ROWS_AT_A_TIME):
            block = self.rows[start : start + ROWS_AT_A_TIME]
            yield from enumerate(self.population.take(block, *names), start)
