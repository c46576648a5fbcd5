"""Near duplicates and held-out prompts: what is found, what is left alone."""

from __future__ import annotations

import random
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen.prompts.dedup import later_copies
from datagen.prompts.minhash import near_duplicates, sketch
from datagen.prompts.mix import Near
from datagen.prompts.plan import PlanResult, build_plan
from datagen.prompts.words import concatenated, hash_words, ngram_hashes, words_of
from datagen.target.profile import load_profile
from tests.prompts.conftest import MakeMix, WordCounter, chat, write_rows


def text(rng: random.Random, words: int) -> str:
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(words))


def duplicates(texts: list[str], near: Near, salt: list[int] | None = None) -> list[bool]:
    words = [words_of(t) for t in texts]
    made = sketch(hash_words(words), near, np.array(salt or [0] * len(texts), dtype=np.uint64))
    everything = np.ones(len(texts), dtype=np.bool_)
    found = near_duplicates(
        made, near, lambda rows: hash_words([words[r] for r in rows]), everything
    )
    return [bool(x) for x in found]


def jaccard(left: str, right: str, n: int) -> float:
    a, b = (
        {tuple(w[i : i + n]) for i in range(len(w) - n + 1)}
        for w in (words_of(left), words_of(right))
    )
    return len(a & b) / len(a | b)


@given(st.text(max_size=40))
def test_case_width_and_punctuation_make_no_difference(given: str) -> None:
    words = words_of(given)
    if any(c.isalnum() for c in given):
        assert words_of(" ".join(words)) == words_of(" ... ".join(words))
    assert words_of("Ｎａｍｅ three, RIVERS!") == ["name", "three", "rivers"]
    assert words_of("東京タワー is") == [*"東京タワー", "is"]
    assert words_of("ডিম पानी") == ["ডিম", "पानी"]
    assert words_of("+++ [>]") == ["+++", "[>]"]


@given(
    st.lists(st.lists(st.text(string.ascii_letters + "éя東", min_size=1, max_size=5), max_size=9))
)
def test_a_word_has_the_same_number_wherever_it_stands(texts: list[list[str]]) -> None:
    hashes = hash_words(texts)
    assert hashes.counts.tolist() == [len(t) for t in texts]
    alone = [hash_words([[w]]).words[0] for t in texts for w in t]
    assert hashes.words.tolist() == alone
    parts = concatenated([hash_words([t]) for t in texts])
    assert parts.words.tolist() == hashes.words.tolist()
    assert parts.offsets.tolist() == hashes.offsets.tolist()


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=7), max_size=6), st.integers(1, 4))
def test_ngrams_are_equal_exactly_when_their_words_are(texts: list[list[str]], n: int) -> None:
    values, owner = ngram_hashes(hash_words(texts), n)
    expected = [
        (i, tuple(t[k : k + n])) for i, t in enumerate(texts) for k in range(len(t) - n + 1)
    ]
    assert owner.tolist() == [i for i, _ in expected]
    names = {gram: value for (_, gram), value in zip(expected, values.tolist(), strict=True)}
    assert [names[g] for _, g in expected] == values.tolist()
    assert len(set(names.values())) == len(names)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans())))
def test_the_first_of_equal_keys_stays(cells: list[tuple[int, bool]]) -> None:
    keys = np.array([k for k, _ in cells], dtype=np.uint64)
    among = np.array([a for _, a in cells], dtype=np.bool_)
    copies = later_copies(keys, among)
    for i in range(len(cells)):
        before = [j for j in range(i) if among[j] and keys[j] == keys[i]]
        assert copies[i] == bool(among[i] and before)


def test_pairs_above_the_threshold_are_found_and_pairs_below_are_kept() -> None:
    rng = random.Random(5)
    near = Near(threshold=0.7)
    texts: list[str] = []
    expected: list[bool] = []
    for _ in range(400):
        words = text(rng, 60).split()
        changed = list(words)
        for i in rng.sample(range(60), rng.randint(0, 8)):
            changed[i] = text(rng, 1)
        texts += [" ".join(words), " ".join(changed).upper()]
        expected += [False, jaccard(texts[-2], texts[-1], near.shingle_words) >= 0.7]
    assert 100 < sum(expected) < 300
    assert duplicates(texts, near) == expected


def test_a_chain_keeps_what_resembles_only_a_dropped_text() -> None:
    rng = random.Random(1)
    first = text(rng, 100).split()
    middle = [*first[:95], *text(rng, 5).split()]
    last = [*middle[5:], *text(rng, 5).split()]
    chain = [" ".join(x) for x in (first, middle, last)]
    assert jaccard(chain[0], chain[2], 3) < 0.85 < jaccard(chain[1], chain[2], 3)
    assert duplicates(chain, Near(threshold=0.85)) == [False, True, False]


def test_a_crowd_of_copies_leaves_one() -> None:
    rng = random.Random(2)
    frame = text(rng, 200)
    crowd = [f"{frame} {text(rng, 1)}" for _ in range(500)]
    assert sum(not d for d in duplicates(crowd, Near())) == 1


def test_prompts_with_other_tools_are_other_prompts() -> None:
    same = text(random.Random(3), 30)
    assert duplicates([same, same, same], Near(), [1, 2, 1]) == [False, False, True]


def test_short_prompts_are_left_to_exact_comparison() -> None:
    assert duplicates(["name three rivers", "name three rivers"], Near()) == [False, False]


HELD = (
    "A train leaves the northern station at seven and travels eighty kilometres an hour while another "
    "train leaves the southern station at eight; when do the two trains meet if the line is long?"
)
SHORT_HELD = "Who painted the ceiling there?"


@pytest.fixture
def screened(tmp_path: Path, make_mix: MakeMix) -> PlanResult:
    rng = random.Random(7)
    boilerplate = text(rng, 20)
    write_rows(tmp_path / "held.jsonl", [chat(HELD), chat("Look at this.", SHORT_HELD)])
    write_rows(tmp_path / "meetings.jsonl", [chat(f"{boilerplate} {text(rng, 3000)}")])
    mixed = {
        "whole": [HELD],
        "restyled": [HELD.upper().replace(" ", "  ") + " !!"],
        "framed": ["Please solve this: " + " ".join(HELD.split()[3:17]) + " and explain."],
        "inside": [f"{text(rng, 2500)} {HELD} {text(rng, 2500)}"],
        "turn": [f"first {text(rng, 4)}", SHORT_HELD.lower()],
        "near-by": [" ".join(HELD.split()[:12]) + " " + text(rng, 12)],
        "transcript": [f"{boilerplate} {text(rng, 4000)}"],
        "talk": ["Who painted the ceiling there yesterday?"],
    }
    write_rows(tmp_path / "x.jsonl", [chat(*turns, name=name) for name, turns in mixed.items()])
    mix = make_mix(
        [
            {
                "name": "s", "file": "../x.jsonl", "count": 8, "columns": {"category": "name"},
                "adapter": "openai",
            }
        ],
        on_short_source="rescale",
        decontaminate={"against": ["../held.jsonl", "../meetings.jsonl"]},
    )  # fmt: skip
    return build_plan(
        mix, renderer=WordCounter(), profile=load_profile("smollm2"), cache=tmp_path / "c"
    )


def test_held_out_prompts_are_found_whole_restyled_framed_planted_and_as_a_turn(
    screened: PlanResult,
) -> None:
    assert {row.category for row in screened.rows} == {"near-by", "transcript", "talk"}


def test_the_report_says_which_set_removed_how_many(screened: PlanResult) -> None:
    assert screened.report.removed_by == {"held": 5, "meetings": 0}
    assert screened.report.reasons() == {"contaminated:held": 5}
