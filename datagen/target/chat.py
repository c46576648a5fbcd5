"""Conversations as a server's OpenAI routes take them, and the prompt ids that these routes tell."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from datagen.target.failures import EndpointFailure, RowFailure
from datagen.target.tokens import Message

log = logging.getLogger(__name__)
TOKENIZE, CHAT = "/v1/tokenize", "/v1/chat/completions"
Ask = Callable[[str, Any, float], Awaitable[Any]]
"""POST a body to a path and have the answer within so many seconds. Raises RequestFailure."""


class Chats:
    """One server's rendering of conversations. `control_s`, `row_s`: patience with a call, with a row."""

    def __init__(self, ask: Ask, *, control_s: float, row_s: float) -> None:
        self._ask, self._control_s, self._row_s = ask, control_s, row_s
        self.route = TOKENIZE
        """Which tells the ids of a rendering; see `render`."""

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> list[int]:
        """The ids to which the server renders a conversation and the generation prompt after it.

        `/v1/tokenize` renders as the chat endpoint does, without a forward pass. Before 0.5.19 it fails with
        500 where the tokenizer names no length, as Kimi's (sgl-project/sglang#16718): where it does so
        twice, and a chat of one token is answered, such chats tell the ids from then on. The prefix
        cache has most of such a prompt when the row itself comes.
        `kwargs`: of the template. Raises RequestFailure.
        """
        body, failed = chat_body(messages, tools, kwargs), ""
        while self.route == TOKENIZE:
            try:
                return prompt_ids_of(await self._ask(TOKENIZE, body, self._control_s), "tokens")
            except EndpointFailure as e:
                if e.reason != "http_500":
                    raise
                if failed:
                    break
                failed = str(e)
        ids = await self.prompt_ids(messages, tools, kwargs)
        if self.route == TOKENIZE:
            log.warning(
                "%s answers %s: contexts are rendered by chats of one token", TOKENIZE, failed
            )
            self.route = CHAT
        return ids

    async def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> list[int]:
        """The ids that the model was given for a chat of one token. Raises RequestFailure."""
        asked = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
        body = {**chat_body(messages, tools, kwargs), **asked}
        answer = await self._ask(CHAT, body, self._row_s)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        return prompt_ids_of(first, "prompt_token_ids")


def chat_body(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """The fields that decide a rendering; `kwargs`: of the template."""
    body: dict[str, Any] = {"messages": list(messages)}
    if tools:
        body["tools"] = list(tools)
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    return body


def prompt_ids_of(answer: Any, name: str) -> list[int]:
    """The field of an answer that holds a prompt's ids. Raises RowFailure."""
    ids = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise RowFailure("no_prompt_token_ids", f"the answer holds no list of ids '{name}'")
    return ids
