"""Rows of many shapes to one shape: a list of raw messages and raw tools, nothing judged yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from datagen.prompts.mix import Source
from datagen.prompts.reader import Fault

USUAL_COLUMNS = {
    "messages": ("messages", "conversations", "conversation"),
    "tools": ("tools", "functions"),
    "prompt": ("prompt", "question", "query"),
    "instruction": ("instruction",),
    "input": ("input",),
    "system": ("system", "system_prompt"),
    "language": ("language", "lang", "meta.lang", "meta.language"),
    "category": ("category", "meta.category"),
    "license": ("license", "licence"),
}
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """What an adapter found in a row."""

    messages: list[Any]
    tools: Any
    has_media: bool


def adapt(row: Any, source: Source) -> RawPrompt | Fault:
    """The messages and tools of a row, by the source's adapter and columns."""
    if not isinstance(row, dict):
        return Fault("row_not_object", type(row).__name__)
    tools = cell(row, source, "tools")
    if source.adapter == "openai-tools" and not tools:
        return Fault("no_tools")
    messages = _messages(row, source)
    if isinstance(messages, Fault):
        return messages
    return RawPrompt(messages, tools, any(row.get(c) for c in MEDIA_COLUMNS))


def cell(row: dict[str, Any], source: Source, role: str) -> Any:
    """What a row holds in the column that plays `role`, or None."""
    named = source.columns.get(role)
    for column in (named,) if named else USUAL_COLUMNS[role]:
        value = column_value(row, column)
        if value is not None:
            return value
    return None


def column_value(row: dict[str, Any], column: str) -> Any:
    """The value of a column; a dot reaches into objects. None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def claims(source: Source, row: Any) -> bool:
    """True when the source's `where` takes the row."""
    if not source.where:
        return True
    return isinstance(row, dict) and all(
        str(column_value(row, column)) in values for column, values in source.where.items()
    )


def text_cell(row: dict[str, Any], source: Source, role: str) -> str | None:
    """A cell that describes a row (language, category, licence): text, or nothing."""
    value = cell(row, source, role)
    return value if isinstance(value, str) and value else None


def _messages(row: dict[str, Any], source: Source) -> list[Any] | Fault:
    adapter = source.adapter
    if adapter in ("auto", "openai", "openai-tools", "sharegpt"):
        value = cell(row, source, "messages")
        if value is not None or adapter != "auto":
            return _message_list(value, source.messages_json)
    if adapter in ("auto", "alpaca"):
        instruction = cell(row, source, "instruction")
        if instruction is not None:
            return _with_system(row, source, _alpaca(instruction, cell(row, source, "input")))
    if adapter in ("auto", "prompt"):
        prompt = cell(row, source, "prompt")
        if prompt is not None:
            return _with_system(row, source, prompt)
    return Fault("no_messages", ", ".join(sorted(map(str, row)))[:80])


def _message_list(value: Any, is_json: bool) -> list[Any] | Fault:
    if value is None:
        return Fault("no_messages")
    if isinstance(value, str):
        if not is_json:
            return Fault("messages_is_string")
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as e:
            return Fault("bad_messages_json", str(e))
    if not isinstance(value, list):
        return Fault("messages_not_a_list", type(value).__name__)
    return value or Fault("empty_conversation")


def _alpaca(instruction: Any, given: Any) -> Any:
    if isinstance(instruction, str) and isinstance(given, str) and given.strip():
        return f"{instruction}\n\n{given}"
    return instruction


def _with_system(row: dict[str, Any], source: Source, user: Any) -> list[Any]:
    system = cell(row, source, "system")
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": user}]
