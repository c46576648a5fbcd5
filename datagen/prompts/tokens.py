"""Prompt tokens by the target's own tokenizer and template, and what they rule out.

A prompt is counted as the context of its last turn with empty answers: every skeleton message,
every tool, the template's frame of every turn and the generation prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from datagen.prompts.cache import cache_key, load_arrays, save_arrays
from datagen.prompts.mix import Mix
from datagen.prompts.population import I64, Population
from datagen.prompts.turns import answer_message, context_messages, split_turns
from datagen.target.profile import Profile
from datagen.target.refusals import REFUSALS
from datagen.target.tokens import Conversation

UNKNOWN, REFUSED = -1, -2
SAVE_EVERY = 50_000
CHARS_AT_A_TIME = 1 << 20


class TokenCounter(Protocol):
    """What counting needs of a renderer."""

    @property
    def digest(self) -> str:
        """Names the tokenizer and template."""
        ...

    def count_many(self, conversations: Sequence[Conversation]) -> list[int]:
        """Lengths of many renderings, in order."""
        ...


class TokenLedger:
    """Token counts of a population: counted when asked for, remembered in the cache."""

    def __init__(
        self,
        population: Population,
        counter: TokenCounter,
        thinking: npt.NDArray[np.bool_] | None,
        thinking_key: list[Any],
        keep: bool = True,
    ) -> None:
        self._population, self._counter, self._thinking = population, counter, thinking
        self._key = cache_key("tokens", counter.digest, thinking_key)
        self._keep = keep
        self._counts: dict[int, npt.NDArray[np.int32]] = {}
        self._unsaved: set[int] = set()
        self._since_saved = 0

    def count(self, rows: I64) -> npt.NDArray[np.int32]:
        """Tokens of some candidates, [m]; REFUSED where the template raises."""
        counts = np.full(len(rows), UNKNOWN, dtype=np.int32)
        for chunk, positions in self._population.by_chunk(rows):
            counts[positions] = self._of_chunk(chunk)[self._population.place[rows[positions], 1]]
        unknown = np.flatnonzero(counts == UNKNOWN)
        if len(unknown):
            counts[unknown] = self._measure(rows[unknown])
            for chunk, positions in self._population.by_chunk(rows[unknown]):
                inside = self._population.place[rows[unknown][positions], 1]
                self._of_chunk(chunk)[inside] = counts[unknown][positions]
                self._unsaved.add(chunk)
            self._since_saved += len(unknown)
            if self._since_saved >= SAVE_EVERY:
                self.save()
        return counts

    def save(self) -> None:
        """Remember what was counted."""
        if self._keep:
            for chunk in self._unsaved:
                save_arrays(self._path(chunk), counts=self._counts[chunk])
        self._unsaved.clear()
        self._since_saved = 0

    def _path(self, chunk: int) -> Path:
        return self._population.chunks[chunk].path.with_suffix(f".tokens-{self._key}.npz")

    def _of_chunk(self, chunk: int) -> npt.NDArray[np.int32]:
        if chunk not in self._counts:
            n_rows = self._population.chunks[chunk].n_rows()
            found = load_arrays(self._path(chunk))
            counts = None if found is None else found.get("counts")
            if counts is None or counts.shape != (n_rows,):
                counts = np.full(n_rows, UNKNOWN, dtype=np.int32)
            self._counts[chunk] = counts
        return self._counts[chunk]

    def _measure(self, rows: I64) -> npt.NDArray[np.int32]:
        counts: list[int] = []
        conversations: list[Conversation] = []
        room = CHARS_AT_A_TIME
        for row, texts in zip(rows, self._population.take(rows, "messages", "tools"), strict=True):
            tools = orjson.loads(texts["tools"]) if texts["tools"] else None
            thinking = None if self._thinking is None else bool(self._thinking[row])
            conversations.append((_whole_context(orjson.loads(texts["messages"])), tools, thinking))
            room -= len(texts["messages"]) + len(texts["tools"] or "")
            if room <= 0:
                counts += self._measure_some(conversations)
                conversations, room = [], CHARS_AT_A_TIME
        return np.array([*counts, *self._measure_some(conversations)], dtype=np.int32)

    def _measure_some(self, conversations: list[Conversation]) -> list[int]:
        try:
            return list(self._counter.count_many(conversations))
        except REFUSALS:
            return [self._measure_one(c) for c in conversations]

    def _measure_one(self, conversation: Conversation) -> int:
        try:
            return self._counter.count_many([conversation])[0]
        except REFUSALS:
            return REFUSED


def _whole_context(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    segments = split_turns(messages)
    return context_messages(segments, [answer_message("")] * (len(segments) - 1), len(segments) - 1)


class Fit:
    """Token counts and the reason why a prompt cannot be asked: nothing is cut to make it fit."""

    def __init__(
        self,
        mix: Mix,
        profile: Profile,
        population: Population,
        ledger: TokenLedger,
        max_new_tokens: list[int],
    ) -> None:
        self._population, self._ledger = population, ledger
        limits = [mix.limits_of(s) for s in mix.all_sources]
        self._least = np.array([x.min_prompt_tokens for x in limits])
        self._most = np.array([x.max_prompt_tokens or np.iinfo(np.int32).max for x in limits])
        self._answer = np.array(max_new_tokens, dtype=np.int64)
        self._context = profile.context_length

    def __call__(self, rows: I64) -> tuple[npt.NDArray[np.int32], list[str | None]]:
        """([m] prompt tokens, [m] reasons or None). `rows`: indices into the population."""
        counts = self._ledger.count(rows)
        rank, n_turns = self._population.rank[rows], self._population.n_turns[rows]
        worst = counts + n_turns * self._answer[rank]
        reasons: list[str | None] = [None] * len(rows)
        # the last to be entered wins: the most telling comes last
        for fails, reason in (
            (counts < self._least[rank], "below_min_prompt_tokens"),
            (counts > self._most[rank], "above_max_prompt_tokens"),
            (worst >= self._context, "over_context"),
            (counts == REFUSED, "template_refused"),
        ):
            for i in np.flatnonzero(fails):
                reasons[i] = reason
        return counts, reasons
