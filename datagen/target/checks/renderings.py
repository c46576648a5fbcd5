"""Conversations that are rendered here and by the server, to be compared id by id.

What SGLang changes before its template runs differs between versions: arguments of tool calls become
objects, a tool gets `defer_loading: null`, in 0.5.17 also `strict` and another order of its keys; Kimi-K2.5
declares tools in code of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datagen.target.chat import CHAT
from datagen.target.checks.subject import Subject
from datagen.target.client import SGLangClient
from datagen.target.failures import RequestFailure, RowFailure
from datagen.target.refusals import REFUSALS
from datagen.target.tokens import Conversation, Message, template_kwargs

QUESTION = "Write three sentences about the sea, then count to ten."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "Height of the tide",
            "parameters": {
                "type": "object",
                "properties": {"harbour": {"type": "string", "description": "Its name"}},
                "required": ["harbour"],
            },
        },
    }
]
TALK: list[Message] = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "The sea is wide. It is deep. It is salt. One, two, three."},
    {"role": "user", "content": "Go on, to ten."},
]
TIDES: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How high is the tide in Brest?"},
    {
        "role": "assistant",
        "content": "I look it up.",
        "tool_calls": [
            {
                "id": "functions.tide:0",
                "type": "function",
                "function": {"name": "tide", "arguments": '{"harbour":"Brest"}'},
            }
        ],
    },
    {
        "role": "tool",
        "content": '{"metres": 4.2}',
        "tool_call_id": "functions.tide:0",
        "name": "tide",
    },
]
TALKED: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {
    "one turn": ([{"role": "user", "content": QUESTION}], None),
    "several turns": ([{"role": "system", "content": "Be brief."}, *TALK], None),
    "tools": (TIDES[1:2], TOOLS),
    "tool results": (TIDES, TOOLS),
    "after tool results": (
        [
            *TIDES,
            {"role": "assistant", "content": "4.2 m."},
            {"role": "user", "content": "Thanks."},
        ],
        TOOLS,
    ),
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids of one conversation, or why there are none.

    `ours`: by the tokenizer here; `chat`: what the server's chat endpoint gave to the model;
    `server`: what the server renders for a run that asks it.
    """

    ours: list[int] | str
    chat: list[int] | RequestFailure
    server: list[int] | RequestFailure

    @property
    def told(self) -> list[int] | None:
        """The chat endpoint's ids."""
        return self.chat if isinstance(self.chat, list) else None


def conversations(thinking_kwarg: str | None) -> dict[str, Conversation]:
    """By name; with a thinking switch each as it is, on and off."""
    modes: dict[str, bool | None] = {"": None}
    if thinking_kwarg is not None:
        modes |= {", thinking on": True, ", thinking off": False}
    return {
        name + suffix: (messages, tools, thinking)
        for suffix, thinking in modes.items()
        for name, (messages, tools) in TALKED.items()
    }


def rendered_sha256(rendered: Mapping[str, list[int] | str | None]) -> str:
    """Of the ids of the conversations, by name."""
    return hashlib.sha256(repr(sorted(rendered.items())).encode()).hexdigest()


async def contexts_sha256(client: SGLangClient, thinking_kwarg: str | None) -> str:
    """What a server renders of all conversations for a run, now; see `rendering.contexts_digest`."""

    async def one(conversation: Conversation) -> list[int] | str:
        messages, tools, thinking = conversation
        try:
            return await client.render(messages, tools, template_kwargs(thinking_kwarg, thinking))
        except RowFailure as e:
            return e.reason

    asked = conversations(thinking_kwarg)
    done = await asyncio.gather(*(one(c) for c in asked.values()))
    return rendered_sha256(dict(zip(asked, done, strict=True)))


async def render_all(subject: Subject) -> dict[str, Rendered]:
    """Every conversation, here and by the server; failures become evidence."""
    asked = conversations(subject.profile.thinking_kwarg)
    first, *others = asked.values()
    done = [await _render(subject, first)]  # which shows by what route the server renders
    done += await asyncio.gather(*(_render(subject, c) for c in others))
    return dict(zip(asked, done, strict=True))


async def _render(subject: Subject, conversation: Conversation) -> Rendered:
    messages, tools, thinking = conversation
    kwargs = template_kwargs(subject.profile.thinking_kwarg, thinking)
    try:
        ours: list[int] | str = subject.renderer.render(messages, tools, thinking)
    except REFUSALS as e:
        ours = f"the template here refuses: {e}"
    chat: list[int] | RequestFailure
    server: list[int] | RequestFailure
    try:
        chat = await subject.client.chats.prompt_ids(messages, tools, kwargs)
    except RequestFailure as e:
        chat = e
    try:
        chats = subject.client.chats
        server = chat if chats.route == CHAT else await chats.render(messages, tools, kwargs)
    except RequestFailure as e:
        server = e
    return Rendered(ours, chat, server)
