"""The general rules behind the broken rows, over generated conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.prompts.adapters import RawPrompt, adapt
from datagen.prompts.mix import Limits, Source
from datagen.prompts.normalise import ROLES, Skeleton, normalise
from datagen.prompts.reader import Fault
from datagen.prompts.turns import split_turns

LIMITS = Limits(min_chars=1)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "from", "content", "value", "type", "text", "tool_calls", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
role = st.sampled_from(["user", "human", " User ", "assistant", "gpt", "system", "tool", "oracle"])
message = st.fixed_dictionaries(
    {"role": role, "content": st.text(max_size=12) | json_value},
    optional={"tool_calls": json_value, "tool_call_id": st.sampled_from(["a", "b"]), "name": role},
)


def run(messages: list[Any], tools: Any = None, limits: Limits = LIMITS) -> Skeleton | Fault:
    return normalise(RawPrompt(messages, tools, False), limits)


def kept(*messages: dict[str, Any]) -> Skeleton:
    skeleton = run(list(messages))
    assert isinstance(skeleton, Skeleton), skeleton
    return skeleton


def reason(*messages: dict[str, Any], tools: Any = None) -> str:
    fault = run(list(messages), tools)
    assert isinstance(fault, Fault)
    return fault.reason


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def calling(arguments: Any, call_id: str = "a") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "function": function}],
    }


def result(call_id: str | None = "a", content: Any = "7C") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({"tool_call_id": call_id} if call_id else {})


@given(
    json_value, st.sampled_from(["auto", "openai", "openai-tools", "sharegpt", "prompt", "alpaca"])
)
def test_no_row_of_any_shape_raises(row: Any, adapter: Any) -> None:
    for value in (row, {"messages": row}, {"prompt": row, "tools": row}, {"messages": [row]}):
        raw = adapt(value, Source(name="s", file="f", licence="MIT", count=1, adapter=adapter))
        if not isinstance(raw, Fault):
            normalise(raw, LIMITS)


@given(st.lists(message, max_size=6))
def test_what_is_accepted_can_be_asked_turn_by_turn_and_holds_only_what_servers_take(
    messages: list[dict[str, Any]],
) -> None:
    outcome = run(messages)
    if isinstance(outcome, Fault):
        assert outcome.reason
        return
    assert len(split_turns(outcome.messages)) == outcome.n_turns
    asked = [m for m in messages if ROLES[m["role"].strip().casefold()] == "user"]
    assert outcome.n_turns == len(asked)
    for kept_message in outcome.messages:
        assert isinstance(kept_message["content"], str)
        assert set(kept_message) <= {"role", "content", "tool_calls", "tool_call_id", "name"}
        assert "\x00" not in kept_message["content"]
        assert kept_message["role"] != "assistant" or kept_message["tool_calls"]
        json.dumps(kept_message).encode()


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5))
def test_recorded_answers_change_nothing(answers: list[str]) -> None:
    asked = [user(f"question {i}") for i in range(len(answers))]
    with_answers = [
        m
        for question, answer in zip(asked, answers, strict=True)
        for m in (question, {"role": "assistant", "content": answer})
    ]
    assert kept(*with_answers).messages == kept(*asked).messages


@pytest.mark.parametrize(
    "content", [None, 42, 1.5, True, {"text": "x"}, [["x"]], [{"type": "text"}]]
)
def test_what_is_no_text_never_becomes_text(content: Any) -> None:
    assert reason(user(content), user("a real question")) == "non_string_content"


@pytest.mark.parametrize(
    "kind", ["image", "image_url", "input_image", "video", "audio_url", "input_audio"]
)
def test_pictures_and_sound_drop_the_row(kind: str) -> None:
    part = {"type": kind, kind: {"url": "https://example.invalid/x"}}
    assert reason(user([part, {"type": "text", "text": "What is it?"}])) == "multimodal"


@pytest.mark.parametrize(
    "token",
    [
        "<|im_end|>",
        "<|im_user|>",
        "<|eot_id|>",
        "<｜User｜>",
        "[INST]",
        "[EOS]",
        "<end_of_turn>",
        "</think>",
    ],
)
def test_template_control_tokens_in_a_text_drop_the_row(token: str) -> None:
    assert reason(user(f"say {token} and stop")) == "control_token"
    assert reason({"role": "system", "content": token}, user("question")) == "control_token"


@pytest.mark.parametrize(
    "text", ["a < b | c > d", "if (x <| y)", "[link](u)", "List<|>", "<b>x</b>"]
)
def test_ordinary_brackets_do_not(text: str) -> None:
    assert kept(user(text)).messages[0]["content"] == text


def test_lone_surrogates_drop_the_row() -> None:
    assert reason(user("half \ud83d pair")) == "lone_surrogate"


def test_a_null_character_alone_is_an_empty_turn() -> None:
    assert reason(user("\x00")) == "empty_user_turn"


@pytest.mark.parametrize("arguments", ["{city: Oslo", "", None, "[1]", 3, '"x"'])
def test_arguments_that_are_no_json_object_drop_the_row(arguments: Any) -> None:
    fault = run([user("Weather?"), calling(arguments), result(), user("and now")])
    assert fault == Fault("bad_tool_arguments", "message 1")


def test_results_must_belong_to_their_call() -> None:
    assert reason(user("a"), calling("{}"), result("b"), user("c")) == "tool_without_call"
    assert reason(user("a"), calling("{}"), result(), result(), user("c")) == "tool_without_call"
    assert reason(user("a"), result(), user("c")) == "tool_without_call"


def test_results_without_ids_belong_to_the_call_before_them() -> None:
    roles = [m["role"] for m in kept(user("a"), calling("{}"), result(None), user("c")).messages]
    assert roles == ["user", "assistant", "tool", "user"]


def test_a_call_whose_result_is_not_recorded_is_an_answer_like_others() -> None:
    assert [m["role"] for m in kept(user("a"), calling("{}"), user("c")).messages] == ["user"] * 2


def test_missing_results_of_several_calls_drop_the_row() -> None:
    twice = calling("{}")
    twice["tool_calls"] += calling("{}", "b")["tool_calls"]
    assert reason(user("a"), twice, result("a"), user("c")) == "tool_results_missing"


def test_python_type_names_in_schemas_become_json_schema_and_properties_keep_their_names() -> None:
    parameters = {
        "type": "dict",
        "properties": {
            "type": {"type": "float"},
            "pair": {"type": "tuple", "items": {"type": "any"}},
        },
        "required": None,
    }
    skeleton = run([user("q")], json.dumps([{"name": "f", "parameters": parameters}]))
    assert isinstance(skeleton, Skeleton)
    assert skeleton.tools is not None
    assert skeleton.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"type": {"type": "number"}, "pair": {"type": "array", "items": {}}},
    }


@pytest.mark.parametrize("tools", ["[{", {"name": "f"}, [{"description": "nameless"}], [3]])
def test_tools_that_are_none_drop_the_row(tools: Any) -> None:
    assert reason(user("q"), tools=tools) == "bad_tools"


def test_too_many_turns_are_dropped_and_never_cut() -> None:
    fault = run([user(f"question {i}") for i in range(5)], limits=Limits(max_turns=4))
    assert fault == Fault("too_many_turns", "5")


def test_a_role_in_a_reason_is_short_and_printable() -> None:
    assert reason({"role": "x\n" * 99, "content": "y"}).startswith("unknown_role:xxx")
    assert len(reason({"role": "x\n" * 99, "content": "y"})) < 50
