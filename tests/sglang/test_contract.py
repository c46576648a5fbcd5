"""Facts about SGLang's API on which the client relies, asked of the embedded target and of SGLang itself."""

from __future__ import annotations

import json
import math
import stat
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from datagen.capture.spool import PROTOCOL, discard, read_spool, spool_path
from datagen.target.checks.renderings import TALKED
from datagen.target.checks.subject import EMBEDDED
from datagen.target.load import load_from_info
from datagen.target.preflight import context_of
from datagen.target.profile import Profile
from tests.sglang.asking import (
    capture,
    conversations,
    generate,
    is_before,
    post,
    rendered_at,
    renderer,
)
from tests.sglang.conftest import CHUNK, Target

FRANCE = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
LONG_ANSWER = {"max_new_tokens": 4000, "ignore_eos": True}  # some ten seconds on a GPU


def published(note: dict[str, Any]) -> Path:
    path = Path(note["path"])
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)
    return path


def wait_until_it_has(target: Target, requests: int, *, or_s: float) -> None:
    """Return once the server says so; where only the embedded one tells, the others have `or_s`."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"{target.url}/server_info", timeout=60) as answer:
            info = json.load(answer)
        if info.get("engine") != EMBEDDED:
            time.sleep(or_s)
            return
        load = load_from_info(info)
        if load is not None and load.running + load.queued >= requests:
            return
        assert time.monotonic() < deadline, load
        time.sleep(0.01)


def test_output_ids_are_exact_and_hold_the_stop_token(target: Target) -> None:
    status, answer = generate(target.url, FRANCE, sampling_params={"max_new_tokens": 40})
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert status == 200
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert ids[-1] == 2
    assert meta["completion_tokens"] == len(ids)
    assert meta["prompt_tokens"] == len(FRANCE)
    assert "Paris" in answer["text"]
    assert "<|im_end|>" not in answer["text"]
    assert meta["num_retractions"] == 0


def test_a_length_stop_says_its_length(target: Target) -> None:
    answer = generate(target.url, FRANCE, sampling_params={"max_new_tokens": 3})[1]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_prompt_token_ids_come_back_when_asked_for(target: Target) -> None:
    answer = generate(target.url, FRANCE, return_prompt_token_ids=True)[1]
    assert answer["prompt_token_ids"] == FRANCE


def test_a_batch_is_answered_in_order_with_its_rids(target: Target) -> None:
    rids = [uuid.uuid4().hex for _ in range(2)]
    params = [{"temperature": 0, "max_new_tokens": n} for n in (1, 2)]
    status, answers = post(
        target.url,
        "/generate",
        {"input_ids": [FRANCE, FRANCE[:9]], "rid": rids, "sampling_params": params},
    )
    assert status == 200
    assert [a["meta_info"]["id"] for a in answers] == rids
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [1, 2]


def test_an_input_beyond_the_context_is_a_permanent_400(target: Target, profile: Profile) -> None:
    n = profile.context_length + 8
    status, answer = generate(target.url, [5] * n)
    assert status == 400
    assert (
        f"The input ({n} tokens) is longer than the model's context length"
        in (answer["error"]["message"])
    )


def test_a_rid_in_flight_is_refused_and_can_be_aborted(target: Target) -> None:
    rid = uuid.uuid4().hex
    with ThreadPoolExecutor() as pool:
        first = pool.submit(generate, target.url, FRANCE, rid=rid, sampling_params=LONG_ANSWER)
        wait_until_it_has(target, 1, or_s=1.0)
        status, refused = generate(target.url, FRANCE, rid=rid)
        assert post(target.url, "/abort_request", {"rid": rid})[0] == 200
        ended = first.result(120)[1]
    assert status == 400
    assert "Duplicate request ID" in refused["error"]["message"]
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"


def test_aborting_an_unknown_rid_is_fine(target: Target) -> None:
    assert post(target.url, "/abort_request", {"rid": "nobody"})[0] == 200


def test_log_probabilities_name_the_likeliest_tokens(target: Target) -> None:
    answer = generate(
        target.url, FRANCE, return_logprob=True, top_logprobs_num=2,
        sampling_params={"max_new_tokens": 3},
    )[1]  # fmt: skip
    meta, ids = answer["meta_info"], answer["output_ids"]
    chosen, tops = meta["output_token_logprobs"], meta["output_top_logprobs"]
    assert [token for _, token, _ in chosen] == ids
    for (score, token, _), (best, second) in zip(chosen, tops, strict=True):
        assert best[1] == token
        assert best[0] == pytest.approx(score, abs=1e-3)
        assert second[0] <= best[0] <= 0
        assert math.exp(best[0]) + math.exp(second[0]) <= 1 + 1e-3


def test_the_server_says_what_it_serves(target: Target, profile: Profile) -> None:
    import json
    import urllib.request

    with urllib.request.urlopen(f"{target.url}/server_info", timeout=60) as answer:
        info = json.load(answer)
    with urllib.request.urlopen(f"{target.url}/model_info", timeout=60) as answer:
        model = json.load(answer)
    assert info["version"]
    assert info["dtype"] == "bfloat16"
    assert info["max_running_requests"] > 0
    assert info["return_hidden_states_mode"] == "full"
    assert info["speculative_algorithm"] is None
    assert len(info["internal_states"]) == 1
    # SGLang refuses prompts a little short of its context, and says so
    assert ("max_req_input_len" in info) is (info.get("engine") != EMBEDDED)
    assert context_of(info, profile) <= profile.context_length
    assert profile.serves(str(model["model_path"]))


@pytest.mark.parametrize("name", TALKED)
def test_a_chat_tells_the_ids_it_was_rendered_to(target: Target, name: str) -> None:
    messages, tools = TALKED[name]
    body: dict[str, Any] = {
        "model": "smollm2", "messages": messages, "max_tokens": 3, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    if tools:
        body["tools"] = tools
    status, answer = post(target.url, "/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == renderer().render(messages, tools, None)
    assert rendered_at(target.url, messages, tools) == choice["prompt_token_ids"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
    native = generate(
        target.url, choice["prompt_token_ids"], sampling_params={"max_new_tokens": 3}
    )[1]
    if is_before(target.url, "0.5.18"):
        assert "response_token_ids" not in choice
        assert native["text"] == choice["message"]["content"]
    else:
        assert len(choice["response_token_ids"]) == 3
        assert native["output_ids"] == choice["response_token_ids"]


# -- captures -------------------------------------------------------------------------------------------


def test_a_capture_answers_with_everything_the_client_checks(
    target: Target, profile: Profile
) -> None:
    ids = conversations(1, 40)[0]
    status, answer = capture(target.url, ids, rid="../../etc/passwd" + uuid.uuid4().hex)
    (note,) = answer["meta_info"]["datagen"]
    assert status == 200
    assert len(answer["output_ids"]) == 1
    assert answer["meta_info"]["hidden_states"] == []
    expected = {
        "rows": len(ids), "width": profile.row_width, "hidden": profile.hidden_size,
        "boundaries": list(profile.boundaries), "final_norm": "post", "dtype": "BF16",
        "bytes": len(ids) * profile.bytes_per_token + 4 * len(ids) + 4, "protocol": PROTOCOL,
    }  # fmt: skip
    assert {k: note[k] for k in expected} == expected
    assert note["self_test"].startswith("passed" if target.is_real else "none")
    path = published(note)
    assert path == spool_path(target.spool, answer["meta_info"]["id"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    spooled = read_spool(path)
    assert (spooled.rid, spooled.input_ids) == (answer["meta_info"]["id"], tuple(ids))
    assert spooled.server == note["server"]
    discard(path)


def test_a_capture_of_more_than_one_token_is_refused_in_its_answer(target: Target) -> None:
    answer = capture(target.url, FRANCE, sampling_params={"max_new_tokens": 2})[1]
    assert "max_new_tokens: 1" in answer["meta_info"]["datagen"][0]["error"]


def test_without_return_hidden_states_nothing_is_captured(target: Target) -> None:
    status, answer = capture(target.url, FRANCE, return_hidden_states=False)
    assert status == 200
    assert "datagen" not in answer["meta_info"]


def test_a_request_that_does_not_opt_in_gets_its_states_as_json(
    target: Target, profile: Profile
) -> None:
    ids = conversations(1, 40)[0]
    rid = uuid.uuid4().hex
    answer = generate(
        target.url, ids, rid=rid, extra_key=rid, return_hidden_states=True,
        sampling_params={"max_new_tokens": 1},
    )[1]  # fmt: skip
    meta = answer["meta_info"]
    assert "datagen" not in meta
    (rows,) = meta["hidden_states"]
    assert (len(rows), {len(r) for r in rows}) == (len(ids), {profile.row_width})
    assert not list(target.spool.glob("*"))


def test_an_aborted_capture_leaves_nothing_behind(target: Target) -> None:
    rids = [uuid.uuid4().hex for _ in range(8)]
    asked = conversations(8, 400)
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(capture, target.url, [*ids, *asked[-1] * 3], rid)
            for ids, rid in zip(asked, rids, strict=True)
        ]
        wait_until_it_has(target, 3, or_s=0.3)
        for rid in rids:
            post(target.url, "/abort_request", {"rid": rid})
        metas = [a.result(300)[1]["meta_info"] for a in answers]
    assert any(m["finish_reason"]["type"] == "abort" for m in metas)
    for meta in metas:  # some may have been ready before they were aborted
        for note in meta.get("datagen") or ():
            if "path" in note:
                discard(published(note))
    time.sleep(0.5)
    assert not list(target.spool.glob("*"))


# -- of SGLang alone: the embedded target has no prefix cache and no chunks -----------------------------


def test_rows_hidden_by_the_prefix_cache_are_refused(sglang_target: Target) -> None:
    ids = conversations(1, 40)[0]
    generate(sglang_target.url, ids, extra_key="shared")
    answer = capture(sglang_target.url, ids, extra_key="shared")[1]
    assert answer["meta_info"]["cached_tokens"] > 0
    assert "cached prefix" in answer["meta_info"]["datagen"][0]["error"]


def test_json_loses_rows_under_chunked_prefill_and_the_spool_does_not(
    sglang_target: Target,
) -> None:
    ids = (conversations(3, 200)[2] * 8)[: CHUNK * 2 + 20]
    answer = generate(
        sglang_target.url, ids, extra_key=uuid.uuid4().hex, return_hidden_states=True,
        sampling_params={"max_new_tokens": 1},
    )[1]  # fmt: skip
    assert len(answer["meta_info"]["hidden_states"][0]) < len(ids)
    (note,) = capture(sglang_target.url, ids)[1]["meta_info"]["datagen"]
    assert note["rows"] == len(ids)
    assert note["chunks"] > 1
    discard(published(note))
