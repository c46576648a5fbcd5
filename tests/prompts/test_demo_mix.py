"""The shipped demo mix: what a first run asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datagen.prompts.identity import prompt_id
from datagen.prompts.mix import load_mix, mix_names
from datagen.prompts.plan import build_plan
from datagen.prompts.reader import read_lines
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


@pytest.mark.parametrize("name", mix_names())
def test_every_shipped_mix_is_valid_and_its_files_are_there(name: str) -> None:
    mix = load_mix(name)
    assert mix.heldout.sources
    for source in mix.all_sources:
        assert source.dataset is not None or mix.files_of(source)
    assert set(mix.decontaminate.against) <= set(mix.heldout_sets())
    assert mix.total == sum(source.count for source in mix.all_sources)


@pytest.mark.parametrize("folder", ["pool", "heldout"])
def test_every_row_of_the_shipped_data_names_terms_that_allow_its_distribution(folder: str) -> None:
    data = Path(__file__).parents[2] / "prompts" / folder
    attribution = (data / "ATTRIBUTION.md").read_text(encoding="utf-8")
    for path in sorted(data.glob("*.jsonl.zst")):
        assert path.name in attribution
        rows = [json.loads(line.data) for line in read_lines(path)]
        licences = {row["license"] for row in rows}
        assert licences <= {
            "MIT", "BSD-3-Clause", "Apache-2.0", "CC-BY-4.0", "CC-BY-3.0", "CC-BY-SA-3.0",
            "CC-BY-SA-4.0", "ODC-BY-1.0",
        }  # fmt: skip
        if any("SA" in licence for licence in licences):
            assert len(licences) == 1, f"{path.name} mixes share-alike rows with others"
        assert not {"staqc-sql", "p3-t0"} & {row["source"] for row in rows}
