"""What a live sitting refuses, from the answers of servers as they are and as they break."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from datagen.acceptance.conditions import require_servers
from datagen.acceptance.live import (
    BASELINE,
    SPECULATIVE,
    Answer,
    LivePrompt,
    Pass,
    Visit,
    counts_of_answer,
    live_report,
    require_spec_fields,
)
from datagen.acceptance.verdict import judged
from datagen.errors import MeasurementError
from datagen.target.client import Generation

PLAIN = {"model_path": "m", "dtype": "bfloat16", "tp_size": 8, "speculative_algorithm": None}
DRAFTING = {
    **PLAIN, "speculative_algorithm": "EAGLE3", "speculative_num_steps": 2,
    "speculative_draft_model_path": "d", "speculative_accept_threshold_single": 1.0,
}  # fmt: skip


def answer(tokens: int, verify_ct: int | None, correct: int = 0, retractions: int = 0,
           histogram: tuple[int, ...] | None = None) -> Answer:  # fmt: skip
    generation = Generation(
        output_ids=np.arange(tokens, dtype=np.int32), text="", finish_reason="length", matched=None,
        prompt_tokens=4, completion_tokens=tokens, cached_tokens=0, num_retractions=retractions,
        spec_verify_ct=verify_ct, spec_num_correct_drafts=correct, spec_histogram=histogram,
    )  # fmt: skip
    return Answer(LivePrompt("a-0", "a", (1, 2), tokens), generation, 0.5)


def test_servers_that_differ_in_the_drafter_alone_are_taken() -> None:
    require_servers(PLAIN, DRAFTING, "http://plain", "http://drafting")
    capture = {**PLAIN, "speculative_algorithm": "EAGLE3"}  # names the convention of the capture
    require_servers(capture, DRAFTING, "http://plain", "http://drafting")


@pytest.mark.parametrize(
    ("baseline", "speculative", "says"),
    [
        ({}, {"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE3"),
        ({}, {"speculative_algorithm": "NGRAM"}, "speculates with NGRAM, not EAGLE3"),
        ({}, {"speculative_algorithm": None}, "speculates with nothing"),
        ({}, {"speculative_accept_threshold_single": 0.8}, "lossy"),
        ({}, {"speculative_adaptive": True}, "changes its draft steps as it goes"),
        ({"speculative_draft_model_path": "d"}, {}, "the baseline server drafts too"),
        ({"tp_size": 4}, {}, "tp_size is 8 with the drafter, 4 without"),
        ({"model_path": "n"}, {}, "model_path is m with the drafter, n without"),
    ],
)
def test_other_servers_are_refused(
    baseline: dict[str, Any], speculative: dict[str, Any], says: str
) -> None:
    with pytest.raises(MeasurementError, match=says):
        require_servers({**PLAIN, **baseline}, {**DRAFTING, **speculative}, "http://a", "http://b")


def test_answers_without_spec_fields_are_refused() -> None:
    with pytest.raises(MeasurementError, match="1 of 2 answers hold no spec_verify_ct"):
        require_spec_fields([answer(9, 4, 4), answer(9, None)], "http://b")


def test_an_accept_len_of_one_everywhere_is_refused_with_its_cause() -> None:
    with pytest.raises(MeasurementError, match="EAGLE instead of EAGLE3"):
        require_spec_fields([answer(9, 8), answer(5, 4)], "http://b")
    require_spec_fields([answer(9, 8), answer(5, 3, 1)], "http://b")


def test_answers_of_one_token_measure_nothing() -> None:
    with pytest.raises(MeasurementError, match="one token long"):
        require_spec_fields([answer(1, None)], "http://b")
    assert counts_of_answer(answer(1, None)).steps == 0


def test_the_prefills_tokens_are_no_verify_steps_tokens() -> None:
    """One from the prefill, and one from that of every retraction."""
    counts = counts_of_answer(answer(10, 4, 5, retractions=2, histogram=(1, 1, 2)))
    assert (counts.tokens, counts.steps) == (7, 4)
    assert counts.eligible == (4, 3, 2)
    assert counts.accepted == (3, 2, 0)


def visit(server: str, *seconds: float, concurrency: int = 1) -> Visit:
    """A visit of one pass per given time of one request of nine tokens."""
    made = []
    for s in seconds:
        a = answer(9, 4 if server == SPECULATIVE else None, 4, histogram=(1, 2, 1))
        made.append(Pass(server, concurrency, s, (Answer(a.prompt, a.generation, s),)))
    about = DRAFTING if server == SPECULATIVE else PLAIN
    return Visit(server, f"http://{server}", dict(about), {"OMP_NUM_THREADS": "1"}, tuple(made))


def test_a_baseline_visited_before_and_after_gives_its_drift() -> None:
    """Two rounds a visit; the machine became slower by a quarter on the way."""
    visits = [visit(BASELINE, 1.0, 1.0), visit(SPECULATIVE, 0.5, 0.5), visit(BASELINE, 1.25, 1.25)]
    report = live_report(visits)
    assert report.baseline_drift == pytest.approx(0.8)
    (speed,) = report.speeds
    assert speed.baseline_tokens_per_s == pytest.approx(36 / 4.5)
    assert speed.speculative_tokens_per_s == pytest.approx(18.0)
    assert speed.cycle_ms == pytest.approx(2 / 18 * 1000)  # 4 steps gave 8 of the 9 tokens
    assert speed.speedups == pytest.approx((2.0, 2.0, 2.5, 2.5)), "beside either visit"
    assert report.accept_len.value == pytest.approx(8 / 4)
    assert report.as_dict()["environments"][BASELINE] == {"OMP_NUM_THREADS": "1"}


def test_a_baseline_that_drifted_past_the_drafter_leaves_it_undecided() -> None:
    """Faster than the baseline before, slower than the one after."""
    visits = [visit(BASELINE, 1.0), visit(SPECULATIVE, 0.8), visit(BASELINE, 0.75)]
    report = live_report(visits)
    (speed,) = report.speeds
    assert speed.speedup > 1
    assert judged(report.accept_len, steps=2, measured=speed).answer == "undecided"


def test_a_baseline_that_came_back_another_is_refused() -> None:
    changed = visit(BASELINE, 1.0)
    changed.arguments["dtype"] = "float16"
    with pytest.raises(
        MeasurementError, match="dtype is bfloat16 with the drafter, float16 without"
    ):
        live_report([visit(BASELINE, 1.0), visit(SPECULATIVE, 0.5), changed])
