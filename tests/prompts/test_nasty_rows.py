"""Every line of a file of broken rows ends as its table says, and so does its whole kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datagen.prompts.mix import Mix
from datagen.prompts.plan import PlanResult, build_plan
from datagen.target.profile import Profile
from tests.prompts.conftest import MakeMix, WordCounter, chat, write_rows

NASTY = Path(__file__).parents[3] / "shared" / "prompts" / "nasty-rows.jsonl"
pytestmark = pytest.mark.skipif(
    not NASTY.is_file(), reason="the file of nasty rows is not beside the checkout"
)
LEAKED = (
    "Name a fish that lives in the deep sea and explain how it copes with the pressure down there."
)
DROPPED = {
    "empty-conversations": "empty_conversation",
    "no-conversation-key": "no_messages",
    "system-only": "no_user_turn",
    "assistant-only": "no_user_turn",
    "empty-user-turn": "empty_user_turn",
    "unknown-role": "unknown_role:observation",
    "content-none": "non_string_content",
    "content-number": "non_string_content",
    "content-image": "multimodal",
    "image-placeholder-text": "multimodal",
    "messages-as-json-string": "messages_is_string",
    "tool-args-bad-json": "bad_tool_arguments",
    "orphan-tool-result": "tool_without_call",
    "bom-line": "bad_json",
    "invalid-utf8": "bad_utf8",
    "bad-json": "bad_json",
    "json-array-line": "row_not_object",
    "one-char": "too_short",
    "truncated-last-line": "bad_json_eof",
    "duplicate-id-same": "exact_duplicate",
    "near-duplicate": "exact_duplicate",
    "huge-turn": "over_context",
    "heldout-leak": "contaminated:fish",
}
ACCEPTED = {
    "ok-sharegpt": ["Name three rivers in Peru."],
    "ok-openai": ["What is a mutex?"],
    "gpt-first": ["Now shorten it."],
    "empty-middle-assistant": ["First question?", "Second question?"],
    "user-user": ["Write a haiku about rain.", "Now one about snow."],
    "ends-with-user": ["Q one?", "Q two?"],
    "role-aliases": ["Alias one?", "Alias two?"],
    "role-case-space": ["Case and spaces in the role."],
    "content-text-parts": ["part one. part two."],
    "tool-args-json-string": ["Weather in Oslo?", "And tomorrow?"],
    "tool-args-dict": ["Weather in Rome?", "Thanks, and Turin?"],
    "tools-as-json-string": ["Book a table for two."],
    "xml-tool-text": ["hi, plain text follows", "continue please"],
    "think-in-history": ["2+2?", "3+3?"],
    "reasoning-field": ["5*5?", "6*6?"],
    "null-byte": ["nullbyte inside"],
    "replacement-chars": ["mojibake \ufffd\ufffd\ufffd text"],
    "u2028-raw": ["line\u2028separator and nel\u0085 inside"],
    "crlf-line": ["file with CRLF line end"],
    "json-nan": ["NaN in a side column"],
    "duplicate-id-different": ["Different text under a reused id."],
    "missing-id": ["Row without an id field."],
    "extra-columns": ["extra keys on the message"],
    "prompt-string-only": ["Row with a bare prompt string."],
    "alpaca-triplet": ["Translate to German.\n\nGood morning."],
}


@pytest.fixture
def nasty_mix(tmp_path: Path, make_mix: MakeMix) -> Mix:
    write_rows(tmp_path / "fish.jsonl", [chat(LEAKED)])
    return make_mix(
        [{"name": "nasty", "file": str(NASTY), "count": len(ACCEPTED) + 1}],  # look at every row
        on_short_source="rescale",
        decontaminate={"against": ["../fish.jsonl"]},
    )


@pytest.fixture
def plan(tmp_path: Path, nasty_mix: Mix, profile: Profile, counter: WordCounter) -> PlanResult:
    return build_plan(nasty_mix, renderer=counter, profile=profile, cache=tmp_path / "cache")


def asked(messages: str) -> list[str]:
    return [m["content"] for m in json.loads(messages) if m["role"] == "user"]


def test_exactly_the_good_rows_are_planned_with_their_texts_untouched(plan: PlanResult) -> None:
    planned = sorted(asked(row.messages) for row in plan.rows)
    assert planned == sorted(ACCEPTED.values())


def test_every_bad_row_is_dropped_for_its_own_reason(plan: PlanResult) -> None:
    expected: dict[str, int] = {}
    for reason in DROPPED.values():
        expected[reason] = expected.get(reason, 0) + 1
    assert dict(plan.report.reasons()) == expected


def test_every_line_is_accounted_for(plan: PlanResult) -> None:
    lines = NASTY.read_bytes().split(b"\n")
    assert plan.report.lines == len(lines)
    assert plan.report.blank == 1
    assert plan.report.is_balanced()
    assert len(DROPPED) + len(ACCEPTED) + plan.report.blank == len(lines)


def test_repairs_are_counted(plan: PlanResult) -> None:
    assert plan.report.notes["null_characters_removed"] == 1
    assert plan.report.notes["replacement_characters"] == 3
    assert plan.report.notes["leading_answers_skipped"] == 1


def test_samples_name_the_line_and_the_particulars(plan: PlanResult) -> None:
    unreadable = plan.report.samples["(unreadable rows)"]
    assert unreadable["bad_utf8"] == ["nasty-rows.jsonl:35: byte 61"]
    assert plan.report.samples["nasty"]["bad_tool_arguments"] == ["nasty-rows.jsonl:23: message 1"]


def test_tool_calls_with_results_stay_as_context_byte_for_byte(plan: PlanResult) -> None:
    by_first = {asked(row.messages)[0]: json.loads(row.messages) for row in plan.rows}
    oslo, rome = by_first["Weather in Oslo?"], by_first["Weather in Rome?"]
    assert [m["role"] for m in oslo] == ["user", "assistant", "tool", "user"]
    assert oslo[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert rome[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Rome"}'
    assert rome[1]["content"] == ""


def test_tools_in_a_string_are_wrapped_and_typed(plan: PlanResult) -> None:
    (row,) = (r for r in plan.rows if asked(r.messages) == ["Book a table for two."])
    assert json.loads(row.tools or "") == [
        {"type": "function", "function": {"name": "book", "parameters": {"type": "object"}}}
    ]


def test_messages_hold_no_key_that_a_server_may_refuse(plan: PlanResult) -> None:
    known = {"role", "content", "tool_calls", "tool_call_id", "name"}
    for row in plan.rows:
        for message in json.loads(row.messages):
            assert set(message) <= known
            assert None not in message.values()


def test_declared_json_messages_are_read(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    line = next(r for r in NASTY.read_bytes().split(b"\n") if b"messages-as-json-string" in r)
    write_rows(tmp_path / "one.jsonl", [line])
    mix = make_mix([{"name": "s", "file": "../one.jsonl", "count": 1, "messages_json": True}])
    (row,) = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c").rows
    assert asked(row.messages) == ["Messages stored as a JSON string."]


def test_strict_sources_drop_conversations_that_begin_with_an_answer(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    mix = make_mix(
        [{"name": "nasty", "file": str(NASTY), "count": 5}],
        defaults={"leading_assistant": "drop"},
    )
    report = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c").report
    assert report.reasons()["assistant_first"] == 1
