"""Raw messages to a skeleton: what the target will be asked, with the recorded answers taken out.

The rules, in the order in which they are applied:
    roles       human/user, gpt/chatgpt/bing/bard/assistant/model, system/developer, tool; others drop
    content     text, or text parts joined; null only beside tool calls; images and sound drop
    answers     recorded answers are dropped; tool calls whose results follow stay, with them
    text        U+0000 is removed, lone surrogates and template control tokens drop the row
    keys        of a message only role, content, tool_calls, tool_call_id and a tool's name stay
Nothing is cut, coerced or guessed: a row that breaks a rule is a Fault with its reason.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from datagen.prompts.adapters import RawPrompt
from datagen.prompts.mix import Limits
from datagen.prompts.reader import Fault
from datagen.prompts.tools import normalise_calls, normalise_tools

Message = dict[str, Any]
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    "tool": "tool",
}
MEDIA_PARTS = ("image", "video", "audio", "file")
CONTROL_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,60}｜>|\[(?:BOS|EOS|EOT|/?INST)\]|</?think>"
    r"|<(?:start|end)_of_turn>"
)
_SUSPECT = re.compile(r"[<\[\x00\ufffd\ud800-\udfff]")


@dataclass(slots=True)
class Skeleton:
    """A conversation to be answered. `notes` counts what was repaired on the way."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    n_turns: int
    notes: Counter[str] = field(default_factory=Counter)


def normalise(raw: RawPrompt, limits: Limits) -> Skeleton | Fault:
    """The skeleton of a raw prompt, or why there is none."""
    notes: Counter[str] = Counter()
    parsed = _parse_messages(raw.messages)
    if isinstance(parsed, Fault):
        return parsed
    if not any(m["role"] == "user" for m in parsed):
        return Fault("no_user_turn")
    kept = _without_answers(parsed, limits, notes)
    if isinstance(kept, Fault):
        return kept
    if raw.has_media:
        return Fault("multimodal", "the row has an image, sound or video")
    fault = _check_texts(kept, notes)
    if fault is not None:
        return fault
    asked = [m["content"] for m in kept if m["role"] == "user"]
    if len(asked) > limits.max_turns:
        return Fault("too_many_turns", str(len(asked)))
    if sum(len(text.strip()) for text in asked) < limits.min_chars:
        return Fault("too_short")
    tools = normalise_tools(raw.tools)
    if isinstance(tools, Fault):
        return tools
    return Skeleton(kept, tools, len(asked), notes)


def _parse_messages(raw: list[Any]) -> list[Message] | Fault:
    """Messages with known roles; contents as they came."""
    parsed: list[Message] = []
    for index, message in enumerate(raw):
        if not isinstance(message, dict):
            return Fault("message_not_object", f"message {index}")
        role = message.get("role") or message.get("from")
        if not isinstance(role, str):
            return Fault("no_role", f"message {index}")
        known = ROLES.get(role.strip().casefold())
        if known is None:
            return Fault(f"unknown_role:{_plain(role)}", f"message {index}")
        content = message["content"] if "content" in message else message.get("value")
        parsed.append({**message, "role": known, "content": content, "index": index})
    return parsed


def _without_answers(
    messages: list[Message], limits: Limits, notes: Counter[str]
) -> list[Message] | Fault:
    """Drops recorded answers; keeps tool calls that have results, and the results."""
    kept: list[Message] = []
    asked = False
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        role = message["role"]
        if role == "tool":
            return Fault("tool_without_call", f"message {message['index']}")
        if role == "assistant":
            results: list[Message] = []
            while position < len(messages) and messages[position]["role"] == "tool":
                results.append(messages[position])
                position += 1
            if results:
                exchange = _tool_exchange(message, results)
                if isinstance(exchange, Fault):
                    return exchange
                if asked:
                    kept += exchange
                    continue
            if not asked and limits.leading_assistant == "drop":
                return Fault("assistant_first")
            notes["leading_answers_skipped"] += not asked
            continue
        text = _text_of(message)
        if isinstance(text, Fault):
            return text
        if not text.strip():
            if role == "user":
                return Fault("empty_user_turn", f"message {message['index']}")
            notes["empty_system_messages_removed"] += 1
            continue
        asked = asked or role == "user"
        kept.append({"role": role, "content": text})
    while kept and kept[-1]["role"] == "system":
        kept.pop()
        notes["trailing_system_messages_removed"] += 1
    return kept


def _tool_exchange(message: Message, results: list[Message]) -> list[Message] | Fault:
    """An answer that calls tools, and the results, each belonging to one of its calls."""
    if not message.get("tool_calls"):
        return Fault("tool_without_call", f"message {results[0]['index']}")
    calls = normalise_calls(message["tool_calls"], message["index"])
    if isinstance(calls, Fault):
        return calls
    said = "" if message["content"] is None else _text_of(message)
    if isinstance(said, Fault):
        return said
    open_ids = {call["id"] for call in calls if "id" in call}
    exchange: list[Message] = [{"role": "assistant", "content": said, "tool_calls": calls}]
    for result in results:
        text = _text_of(result)
        if isinstance(text, Fault):
            return text
        kept: Message = {"role": "tool", "content": text}
        call_id = result.get("tool_call_id")
        if isinstance(call_id, str):
            if call_id not in open_ids:
                return Fault("tool_without_call", f"message {result['index']}")
            open_ids.discard(call_id)
            kept["tool_call_id"] = call_id
        if isinstance(result.get("name"), str):
            kept["name"] = result["name"]
        exchange.append(kept)
    if len(results) != len(calls):
        return Fault("tool_results_missing", f"message {message['index']}")
    return exchange


def _text_of(message: Message) -> str | Fault:
    """A message's content as text. None and numbers never become text."""
    content = message["content"]
    if isinstance(content, str):
        return content
    where = f"message {message['index']}"
    if not isinstance(content, list):
        return Fault("non_string_content", f"{where}: {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and any(m in str(part.get("type")) for m in MEDIA_PARTS):
            return Fault("multimodal", where)
        else:
            return Fault("non_string_content", where)
    return "".join(texts)


def _check_texts(messages: list[Message], notes: Counter[str]) -> Fault | None:
    """Repairs and judges the characters of every text that stays, in place."""
    for message in messages:
        text = message["content"]
        if _SUSPECT.search(text) is None:
            continue
        if "\x00" in text:
            notes["null_characters_removed"] += text.count("\x00")
            text = message["content"] = text.replace("\x00", "")
        if not text.isascii():
            if not _is_encodable(text):
                return Fault("lone_surrogate")
            notes["replacement_characters"] += text.count("\ufffd")
        control = CONTROL_TOKEN.search(text)
        if control is not None:
            return Fault("control_token", control.group())
        if message["role"] == "user" and not text.strip():
            return Fault("empty_user_turn")
    return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(role: str) -> str:
    """A role as it may appear in a reason: short, printable, on one line."""
    return "".join(c for c in role.strip() if c.isprintable() and c.isascii())[:32]
