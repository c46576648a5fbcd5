"""Conversations as a server's OpenAI routes take them, and the prompt ids that these routes tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datagen.target.failures import RowFailure
from datagen.target.tokens import Message


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
