"""From a mix to the frozen rows: order, counts, caps, limits, splits, cache, and clear errors."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from datagen.errors import MixError, PromptDataError
from datagen.prompts import intake
from datagen.prompts.identity import prompt_id
from datagen.prompts.mix import load_mix, mix_digest
from datagen.prompts.plan import PlanResult, build_plan
from datagen.prompts.split import require_disjoint
from datagen.store.plan import write_plan
from datagen.target.profile import Profile, load_profile
from datagen.target.tokens import Conversation
from tests.prompts.conftest import MakeMix, WordCounter, chat, sentence, write_rows


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    copies = [chat(sentence(i).upper() + "!") for i in range(0, 60, 7)]
    return [chat(sentence(i), id=i) for i in range(300)] + copies


def planned(result: PlanResult) -> list[str]:
    return [json.loads(row.messages)[0]["content"] for row in result.rows]


def test_the_frozen_plan_is_the_same_bytes_for_any_order_files_and_workers(
    tmp_path: Path,
    make_mix: MakeMix,
    profile: Profile,
    counter: WordCounter,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shuffled = list(rows)
    random.Random(4).shuffle(shuffled)
    write_rows(tmp_path / "a" / "x.jsonl", rows)
    write_rows(tmp_path / "b" / "1.jsonl", shuffled[:90])
    write_rows(tmp_path / "b" / "2.jsonl", shuffled[90:])
    frozen = []
    for number, (files, workers, chunk) in enumerate(
        [("../a/x.jsonl", 1, 4096), ("../b/*.jsonl", 1, 50), ("../b/*.jsonl", 2, 4096)]
    ):
        monkeypatch.setattr(intake, "CHUNK_ROWS", chunk)
        mix = make_mix([{"name": "s", "file": files, "count": 200}])
        result = build_plan(
            mix, renderer=counter, profile=profile, cache=tmp_path / f"c{number}", workers=workers
        )
        path = tmp_path / f"{number}.arrow"
        write_plan(path, result.rows, {})
        frozen.append(path.read_bytes())
    assert frozen[0] == frozen[1] == frozen[2]


def test_of_equal_prompts_one_stays_and_the_books_balance(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter,
    rows: list[dict[str, Any]],
) -> None:  # fmt: skip
    write_rows(tmp_path / "x.jsonl", rows)
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 300}])
    result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert result.report.reasons() == {"exact_duplicate": 9}
    assert {text.casefold().rstrip("!") for text in planned(result)} == {
        sentence(i).casefold() for i in range(300)
    }
    assert result.report.is_balanced()


def test_partitions_are_contiguous_and_of_one_split(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(100)])
    write_rows(tmp_path / "h.jsonl", [chat(sentence(i)) for i in range(200, 230)])
    mix = make_mix(
        [{"name": "s", "file": "../x.jsonl", "count": 100}],
        heldout={"sources": [{"name": "h", "file": "../h.jsonl", "count": 30}]},
    )
    rows = list(
        build_plan(
            mix, renderer=counter, profile=profile, cache=tmp_path / "c", partition_prompts=8
        ).rows
    )
    numbers = [r.partition for r in rows]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(4 + 13))
    assert max(Counter(numbers).values()) == 8
    splits = {n: {r.split for r in rows if r.partition == n} for n in numbers}
    assert all(len(s) == 1 for s in splits.values())


def test_a_held_out_prompt_is_never_trained_on(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(100)])
    write_rows(tmp_path / "h.jsonl", [chat(sentence(i)) for i in range(90, 110)])
    mix = make_mix(
        [{"name": "s", "file": "../x.jsonl", "count": 90}],
        heldout={"sources": [{"name": "h", "file": "../h.jsonl", "count": 20}], "hash_share": 0.2},
    )
    result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert result.report.removed_by == {"h": 10}
    by_split: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for row in result.rows:
        by_split[row.split].add(row.prompt_id)
    assert not by_split["train"] & by_split["heldout"]
    assert 20 + 5 < len(by_split["heldout"]) < 20 + 35
    assert result.report.digests["train"] != result.report.digests["heldout"]


def test_an_overlap_of_the_splits_is_refused() -> None:
    require_disjoint(["a", "b"], ["c"], "run")
    with pytest.raises(PromptDataError, match=r"1 held-out prompts were trained on, b among them"):
        require_disjoint(["a", "b"], ["c", "b"], "run")


def test_held_out_by_hash_stays_held_out_when_the_mix_grows(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(200)])
    held = []
    for count in (100, 200):
        mix = make_mix(
            [{"name": "s", "file": "../x.jsonl", "count": count}], heldout={"hash_share": 0.3}
        )
        result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
        held.append({r.prompt_id for r in result.rows if r.split == "heldout"})
    assert held[0] < held[1]


def test_a_limit_keeps_the_proportions_and_a_share_held_out(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    for name, first, n in (("a", 0, 300), ("b", 1000, 100), ("h", 2000, 40)):
        write_rows(tmp_path / f"{name}.jsonl", [chat(sentence(first + i)) for i in range(n)])
    mix = make_mix(
        [
            {"name": "a", "file": "../a.jsonl", "count": 300},
            {"name": "b", "file": "../b.jsonl", "count": 100},
        ],
        heldout={"sources": [{"name": "h", "file": "../h.jsonl", "count": 40}]},
    )
    for limit, expected in (
        (40, (27, 9, 4)),
        (1, (1, 0, 0)),
        (439, (299, 100, 40)),
        (999, (300, 100, 40)),
    ):
        result = build_plan(
            mix, renderer=counter, profile=profile, limit=limit, cache=tmp_path / "c"
        )
        taken = result.report.planned
        assert (taken["a"], taken["b"], taken["h"]) == expected


def test_what_does_not_fit_the_context_in_the_worst_case_is_dropped_and_made_up_for(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    long = [chat(f"start {i} " + "word " * 8000) for i in range(5)]
    turns = [chat(*(f"{sentence(i)} turn {k}" for k in range(16))) for i in range(5)]
    write_rows(tmp_path / "x.jsonl", long + turns + [chat(sentence(100 + i)) for i in range(50)])
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 50}])
    result = build_plan(
        mix, renderer=counter, profile=profile, max_new_tokens=600, cache=tmp_path / "c"
    )
    assert len(result.rows) == 50
    for row in result.rows:
        assert row.prompt_tokens + row.n_turns * row.max_new_tokens < profile.context_length
    seen = result.report.reasons()["over_context"] + sum(result.report.unused.values())
    assert seen == 10


def test_no_value_of_a_column_takes_more_than_its_share(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    mixed = [chat(sentence(i), kind="maths" if i % 10 else f"k{i // 10 % 4}") for i in range(400)]
    write_rows(tmp_path / "x.jsonl", mixed)
    cap = {"column": "kind", "max_share": 0.25}
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 40, "cap_by": cap}])
    result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    kinds = Counter(mixed[int(text.split()[1].rstrip(":"))]["kind"] for text in planned(result))
    assert len(result.rows) == 40
    assert max(kinds.values()) <= 10
    assert result.report.reasons()["over_cap"] > 0
    assert result.report.is_balanced()


def test_thinking_is_decided_by_the_prompt_where_the_target_has_a_switch(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(400)])
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 400}], thinking={"on_share": 0.6})
    plain = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    kimi = build_plan(
        mix, renderer=counter, profile=load_profile("kimi-k2.5"), cache=tmp_path / "c"
    )
    assert {r.thinking for r in plain.rows} == {None}
    assert 0.5 < sum(bool(r.thinking) for r in kimi.rows) / 400 < 0.7
    for row in kimi.rows:
        assert row.prompt_id == prompt_id(json.loads(row.messages), None, row.thinking)


def test_an_interrupted_plan_goes_on_where_it_stopped(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(intake, "CHUNK_ROWS", 50)
    write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(500)])
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 400}])
    undisturbed = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "other")
    made: list[Path] = []
    make_chunk = intake.make_chunk

    def counting(job: intake.ChunkJob) -> intake.Chunk:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(job.path)
        return make_chunk(job)

    monkeypatch.setattr(intake, "make_chunk", counting)
    with pytest.raises(KeyboardInterrupt):
        build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    made[2].write_bytes(b"torn")
    made.clear()
    monkeypatch.setattr(
        intake, "make_chunk", lambda job: (made.append(job.path), make_chunk(job))[1]
    )
    resumed = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert len(made) == 8
    assert list(resumed.rows) == list(undisturbed.rows)
    counted = counter.counted
    made.clear()
    build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert (made, counter.counted) == ([], counted)


def test_the_cache_knows_content_and_not_names(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(20)])
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 20}])
    before = mix_digest(mix)
    build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    write_rows(path, [chat(sentence(i)) for i in range(50, 70)])
    result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert set(planned(result)) == {sentence(i) for i in range(50, 70)}
    assert mix_digest(mix) != before
    after = mix_digest(mix)
    path.rename(tmp_path / "y.jsonl")
    assert mix_digest(make_mix([{"name": "s", "file": "../y.jsonl", "count": 20}])) == after


def test_a_prompt_that_the_template_refuses_is_dropped_alone(
    tmp_path: Path, make_mix: MakeMix, profile: Profile
) -> None:
    class Choosy(WordCounter):
        def count_many(self, conversations: Sequence[Conversation]) -> list[int]:
            if any("question 3:" in c[0][0]["content"] for c in conversations):
                raise jinja2.TemplateError("no such thing")
            return super().count_many(conversations)

    write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(10)])
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 10}], on_short_source="rescale")
    result = build_plan(mix, renderer=Choosy(), profile=profile, cache=tmp_path / "c")
    assert (len(result.rows), result.report.reasons()) == (9, {"template_refused": 1})


def test_sources_that_share_a_file_each_take_their_own_rows(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    mixed = [chat(sentence(i), meta={"kind": "ab"[i % 2]}) for i in range(40)] + [
        chat(sentence(99))
    ]
    write_rows(tmp_path / "x.jsonl", mixed)
    mix = make_mix(
        [{"name": k, "file": "../x.jsonl", "count": 20, "where": {"meta.kind": [k]}} for k in "ab"]
    )
    result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert result.report.planned == {"a": 20, "b": 20}
    assert result.report.unclaimed == 1
    assert result.report.lines == 41


def test_a_dataset_is_streamed_with_its_columns(
    tmp_path: Path, make_mix: MakeMix, profile: Profile, counter: WordCounter
) -> None:
    pytest.importorskip("datasets")
    turns = [
        [{"from": "human", "value": sentence(i)}, {"from": "gpt", "value": "x"}] for i in range(30)
    ]
    folder = tmp_path / "dataset"
    folder.mkdir()
    pq.write_table(pa.table({"talk": turns, "topic": ["t"] * 30}), folder / "train.parquet")
    mix = make_mix(
        [
            {
                "name": "hub", "dataset": str(folder), "count": 25, "adapter": "sharegpt",
                "columns": {"messages": "talk", "category": "topic"},
            }
        ]
    )  # fmt: skip
    result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert len(result.rows) == 25
    assert {r.category for r in result.rows} == {"t"}
    pq.write_table(pa.table({"talk": turns, "topic": ["u"] * 30}), folder / "train.parquet")
    result = build_plan(mix, renderer=counter, profile=profile, cache=tmp_path / "c")
    assert {r.category for r in result.rows} == {"u"}, "a changed dataset must be read again"


def failure(mix_or_name: Any, tmp_path: Path, error: type[Exception]) -> str:
    def attempt() -> None:
        mix = load_mix(mix_or_name) if isinstance(mix_or_name, str) else mix_or_name
        smollm2 = load_profile("smollm2")
        build_plan(mix, renderer=WordCounter(), profile=smollm2, cache=tmp_path / "c")

    with pytest.raises(error) as caught:
        attempt()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_unknown_mix_names_those_there_are(tmp_path: Path) -> None:
    assert "demo" in failure("no-such-mix", tmp_path, MixError)


def test_a_missing_data_file_is_named(tmp_path: Path, make_mix: MakeMix) -> None:
    mix = make_mix([{"name": "s", "file": "../gone.jsonl", "count": 1}])
    assert "gone.jsonl" in failure(mix, tmp_path, PromptDataError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take permissions from itself")
def test_a_directory_without_permission_is_told(tmp_path: Path, make_mix: MakeMix) -> None:
    write_rows(tmp_path / "shut" / "x.jsonl", [chat(sentence(1))])
    (tmp_path / "shut").chmod(0)
    mix = make_mix([{"name": "s", "file": "../shut/x.jsonl", "count": 1}])
    os.seteuid(65534)
    try:
        text = failure(mix, tmp_path, PromptDataError)
    finally:
        os.seteuid(0)
    assert "Permission denied" in text
    assert "x.jsonl" in text


def test_counts_that_do_not_add_up_are_told(make_mix: MakeMix) -> None:
    with pytest.raises(MixError, match=r"add up to 5, but total is 7"):
        make_mix([{"name": "s", "file": "../x.jsonl", "count": 5}], total=7)


def test_an_unknown_key_is_named(make_mix: MakeMix) -> None:
    with pytest.raises(MixError, match=r"sources\.0\.cuont"):
        make_mix([{"name": "s", "file": "../x.jsonl", "count": 5, "cuont": 3}])


def test_a_mix_that_is_no_yaml_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("version: [1\n")
    assert "YAML" in failure(str(tmp_path / "m.yaml"), tmp_path, MixError)


def test_a_short_source_tells_what_it_lost(tmp_path: Path, make_mix: MakeMix) -> None:
    write_rows(tmp_path / "x.jsonl", [chat(sentence(i)) for i in range(5)] + [chat("?")] * 3)
    text = failure(make_mix([{"name": "s", "file": "../x.jsonl", "count": 9}]), tmp_path, MixError)
    assert "'s' has 5 usable prompts" in text
    assert "too_short 3" in text


def test_a_truncated_file_is_told(tmp_path: Path, make_mix: MakeMix) -> None:
    path = tmp_path / "x.jsonl.zst"
    whole = b"".join(json.dumps(chat(sentence(i))).encode() + b"\n" for i in range(500))
    path.write_bytes(zstandard.compress(whole)[:-40])
    mix = make_mix([{"name": "s", "file": "../x.jsonl.zst", "count": 9}])
    assert "cut off" in failure(mix, tmp_path, PromptDataError)


def test_a_file_in_another_encoding_is_told(tmp_path: Path, make_mix: MakeMix) -> None:
    latin = [
        json.dumps(chat(f"où est {i}"), ensure_ascii=False).encode("latin-1") for i in range(9)
    ]
    write_rows(tmp_path / "x.jsonl", latin)
    mix = make_mix([{"name": "s", "file": "../x.jsonl", "count": 9}])
    text = failure(mix, tmp_path, PromptDataError)
    assert "none of 9 rows is a prompt; first: bad_utf8 at x.jsonl:1" in text


def test_a_gated_dataset_without_a_token_is_told(
    tmp_path: Path, make_mix: MakeMix, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")
    httpx = pytest.importorskip("httpx")
    answer = httpx.Response(403, request=httpx.Request("GET", "https://example.invalid"))

    def refuse(*_: Any, **__: Any) -> None:
        raise errors.GatedRepoError(
            "Access to dataset o/d is restricted\nand more", response=answer
        )

    monkeypatch.setattr(hub.HfApi, "dataset_info", refuse)
    mix = make_mix([{"name": "s", "dataset": "o/d", "count": 9, "gated": True}])
    text = failure(mix, tmp_path, PromptDataError)
    assert "gated" in text
    assert "HF_TOKEN" in text


def test_a_hub_that_cannot_be_reached_is_told(
    tmp_path: Path, make_mix: MakeMix, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "HfApi", lambda: hub.hf_api.HfApi(endpoint="http://127.0.0.1:9"))
    mix = make_mix([{"name": "s", "dataset": "o/d", "count": 9}])
    text = failure(mix, tmp_path, PromptDataError)
    assert "dataset of source 's' cannot be read" in text
    assert "that the hub can be reached" in text
