"""Where the target speaks: a skeleton cut into segments, and the context of each of its turns.

A skeleton is the conversation without the recorded answers. Every user message is answered once.
A recorded tool call whose results are known stays as context, directly after the user message
that led to it; the answer is then generated after the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def split_turns(messages: list[Message]) -> list[list[Message]]:
    """Segments of a skeleton; the target answers at the end of each.

    Segment k is user message k with what stands in front of it (system messages) and the kept
    tool calls and results that follow it. The segments in order are the messages in order.
    Raises ValueError on a skeleton without a user message, or with messages after which no
    turn is generated.
    """
    segments: list[list[Message]] = [[]]
    asked = False
    for message in messages:
        if asked and message["role"] in ("user", "system"):
            segments.append([])
            asked = False
        segments[-1].append(message)
        asked = asked or message["role"] == "user"
    if not asked:
        raise ValueError("a skeleton ends in a user turn")
    return segments


def answer_message(
    text: str, *, reasoning_end: str | None = None, thinking: bool | None = None
) -> Message:
    """An answer of the target as the next turn's context holds it: what a client would send back.

    As SGLang's reasoning parsers split it: what stands before `reasoning_end` (`</think>`; models that
    write `<think>` themselves lose it) is reasoning, which the template keeps or drops; without that mark
    a thinking answer was cut while it reasoned.
    """
    if reasoning_end is None or thinking is False:
        return {"role": "assistant", "content": text}
    start = reasoning_end.replace("/", "", 1)
    reasoning, _, said = text.removeprefix(start).partition(reasoning_end)
    return {"role": "assistant", "content": said, "reasoning_content": reasoning}


def context_messages(
    segments: list[list[Message]], answers: Sequence[Message], turn: int
) -> list[Message]:
    """The messages that turn `turn` is asked with: segments 0..turn, each earlier one answered."""
    messages = list(segments[0])
    for answer, segment in zip(answers[:turn], segments[1 : turn + 1], strict=True):
        messages.append(answer)
        messages.extend(segment)
    return messages
