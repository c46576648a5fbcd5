"""Where the target speaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.prompts.turns import answer_message, context_messages, split_turns


def said(role: str, content: str = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = said("assistant", "", tool_calls=[{"id": "a"}])
RESULT = said("tool", "7C", tool_call_id="a")


def test_every_user_message_is_answered_once() -> None:
    skeleton = [said("system"), said("user", "a"), said("user", "b")]
    assert split_turns(skeleton) == [skeleton[:2], skeleton[2:]]


def test_the_answer_comes_after_the_results_of_a_recorded_call() -> None:
    skeleton = [said("user", "a"), CALL, RESULT, said("user", "b")]
    segments = split_turns(skeleton)
    assert segments == [skeleton[:3], skeleton[3:]]
    assert context_messages(segments, [answer_message("now")], 1) == [
        *skeleton[:3], said("assistant", "now"), skeleton[3],
    ]  # fmt: skip


def test_a_later_system_message_stands_before_the_next_question() -> None:
    skeleton = [said("user", "a"), said("system", "s"), said("user", "b")]
    assert split_turns(skeleton) == [skeleton[:1], skeleton[1:]]


def test_a_skeleton_without_a_question_is_refused() -> None:
    with pytest.raises(ValueError, match="ends in a user turn"):
        split_turns([said("system")])


piece = st.sampled_from([[said("user", "u")], [said("user", "u"), CALL, RESULT]])


@given(st.lists(piece, min_size=1, max_size=6), st.booleans())
def test_segments_in_order_are_the_skeleton_and_contexts_grow_by_one_answer(
    pieces: list[list[dict[str, Any]]], with_system: bool
) -> None:
    skeleton = [said("system")] * with_system + [m for p in pieces for m in p]
    segments = split_turns(skeleton)
    assert [m for s in segments for m in s] == skeleton
    assert len(segments) == len(pieces)
    answers = [f"answer {i}" for i in range(len(segments))]
    for turn in range(len(segments)):
        context = context_messages(segments, [answer_message(a) for a in answers], turn)
        spoken = [m["content"] for m in context if m["content"].startswith("answer")]
        assert spoken == answers[:turn]
        assert context[-1]["role"] in ("user", "tool")
