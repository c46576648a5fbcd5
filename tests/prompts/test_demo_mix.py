"""The shipped demo mix: what a first run asks."""

from __future__ import annotations

import json
from pathlib import Path

from datagen.prompts.identity import prompt_id
from datagen.prompts.mix import load_mix
from datagen.prompts.plan import build_plan
from datagen.target.profile import Profile
from tests.prompts.conftest import WordCounter


def test_a_limited_run_takes_every_kind_of_prompt_and_a_tenth_held_out(
    tmp_path: Path, profile: Profile, counter: WordCounter
) -> None:
    result = build_plan(
        load_mix("demo"), renderer=counter, profile=profile, limit=200, cache=tmp_path
    )
    rows = list(result.rows)
    train = [r for r in rows if r.split == "train"]
    assert (len(rows), len(train)) == (200, 180)
    assert sum(r.n_turns > 1 for r in train) >= 15
    assert sum(r.tools is not None for r in train) >= 15
    assert len({r.language for r in train}) >= 5
    assert {"code", "maths", "tools", "chat"} <= {r.category for r in train}
    assert {r.licence for r in train} <= {
        "MIT", "BSD-3-Clause", "Apache-2.0", "CC-BY-4.0", "CC-BY-SA-4.0",
    }  # fmt: skip
    assert result.report.is_balanced()


def test_the_whole_demo_mix_has_the_rows_that_it_promises(
    tmp_path: Path, profile: Profile, counter: WordCounter
) -> None:
    result = build_plan(load_mix("demo"), renderer=counter, profile=profile, cache=tmp_path)
    assert result.report.splits["train"]["prompts"] == 2000
    assert result.report.splits["heldout"]["prompts"] == 200


def test_every_id_is_that_of_its_content(
    tmp_path: Path, profile: Profile, counter: WordCounter
) -> None:
    result = build_plan(
        load_mix("demo"), renderer=counter, profile=profile, limit=60, cache=tmp_path
    )
    for row in result.rows:
        tools = json.loads(row.tools) if row.tools else None
        assert row.prompt_id == prompt_id(json.loads(row.messages), tools, row.thinking)
