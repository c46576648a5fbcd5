"""What clients of SGLang rely on, asked of a running server."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from datagen.capture.spool import spool_path
from tests.tiny import BOUNDARIES, HIDDEN, serving, write_tiny_checkpoint

IDS = [1, 40, 41, 42, 43, 44]
CONTEXT = 4096
ENDLESS = {"max_new_tokens": CONTEXT - 100, "ignore_eos": True}  # many times what a look takes


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("api")
    checkpoint = write_tiny_checkpoint(folder / "tiny-llama", context=CONTEXT)
    with serving(str(checkpoint), folder) as process:
        yield process.url


def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data=data)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            raw = answer.read()
            return answer.status, json.loads(raw) if raw else None
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.loads(e.read())


def generate(url: str, **body: Any) -> tuple[int, Any]:
    params = {"temperature": 0, "max_new_tokens": 5, **body.pop("sampling_params", {})}
    return post(url, "/generate", {"input_ids": IDS, "sampling_params": params, **body})


def test_an_answer_has_sglangs_fields(url: str) -> None:
    status, answer = generate(url, rid="r1", return_prompt_token_ids=True)
    assert status == 200
    meta = answer["meta_info"]
    assert meta["id"] == "r1"
    assert meta["prompt_tokens"] == len(IDS)
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 5
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert answer["prompt_token_ids"] == IDS
    assert isinstance(answer["text"], str)


def test_a_batch_is_answered_in_order(url: str) -> None:
    one = generate(url)[1]["output_ids"]
    status, answers = post(
        url,
        "/generate",
        {
            "input_ids": [IDS, IDS[:3]],
            "rid": ["x", "y"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 5},
        },
    )
    assert status == 200
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y"]
    assert answers[0]["output_ids"] == one


def test_an_over_long_input_is_a_400_in_sglangs_words(url: str) -> None:
    status, answer = generate(url, input_ids=[5] * (CONTEXT + 10))
    assert status == 400
    assert answer["error"]["message"] == (
        f"The input ({CONTEXT + 10} tokens) is longer than the model's context length "
        f"({CONTEXT} tokens)."
    )


def load(url: str) -> tuple[int, int]:
    """Requests running, requests queued."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        (state,) = json.load(answer)["internal_states"]
    return state["num_running_reqs"], state["num_queue_reqs"]


def wait_for_load(url: str, wanted: tuple[int, int]) -> None:
    deadline = time.monotonic() + 60
    while load(url) != wanted:
        assert time.monotonic() < deadline, f"{load(url)} requests, not {wanted}"
        time.sleep(0.01)


def test_a_request_id_in_flight_is_refused_and_can_be_aborted(url: str) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(generate, url, rid="same", sampling_params=ENDLESS)
        wait_for_load(url, (1, 0))
        status, refused = generate(url, rid="same")
        assert post(url, "/abort_request", {"rid": "same"})[0] == 200
        assert first.result(60)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert status == 400
    assert "Duplicate request ID detected" in refused["error"]["message"]
    assert generate(url, rid="same")[0] == 200


def test_abort_all_ends_a_whole_batch(url: str) -> None:
    with ThreadPoolExecutor() as pool:
        body = {"input_ids": [IDS] * 3, "rid": "b", "sampling_params": ENDLESS}
        batch = pool.submit(post, url, "/generate", body)
        wait_for_load(url, (3, 0))
        assert post(url, "/abort_request", {"abort_all": True})[0] == 200
        metas = [a["meta_info"] for a in batch.result(60)[1]]
    assert [m["id"] for m in metas] == ["b_0", "b_1", "b_2"]
    assert {m["finish_reason"]["type"] for m in metas} == {"abort"}


def test_a_client_that_goes_away_frees_its_place(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = {"input_ids": IDS, "sampling_params": ENDLESS}
    connection.request("POST", "/generate", json.dumps(body))
    wait_for_load(url, (1, 0))
    connection.close()
    wait_for_load(url, (0, 0))


def test_health_generate_proves_that_a_token_comes_out(url: str) -> None:
    with urllib.request.urlopen(f"{url}/health_generate", timeout=30) as answer:
        assert answer.status == 200


def test_text_is_tokenised_and_answered_like_its_ids(url: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 5}
    _, answer = post(
        url,
        "/generate",
        {"text": "Name three rivers", "sampling_params": params, "return_prompt_token_ids": True},
    )
    assert generate(url, input_ids=answer["prompt_token_ids"])[1]["text"] == answer["text"]


def test_a_stop_string_ends_an_answer_and_is_trimmed_unless_asked_for(url: str) -> None:
    free = generate(url, sampling_params={"max_new_tokens": 12, "ignore_eos": True})[1]["text"]
    stop = free[3:5]
    params = {"max_new_tokens": 12, "ignore_eos": True, "stop": stop}
    trimmed = generate(url, sampling_params=params)[1]
    kept = generate(url, sampling_params={**params, "no_stop_trim": True})[1]
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert trimmed["text"] == free[: free.index(stop)]
    assert free.startswith(kept["text"])
    assert stop in kept["text"]


def test_more_tokens_than_the_context_holds_are_refused_in_sglangs_words(url: str) -> None:
    assert (
        generate(url, input_ids=[5] * (CONTEXT - 1), sampling_params={"max_new_tokens": 1})[0]
        == 200
    )
    status, answer = generate(url, sampling_params={"max_new_tokens": CONTEXT})
    assert status == 400
    assert answer["error"]["message"].startswith(
        f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens."
    )


def test_aborting_an_unknown_request_is_fine(url: str) -> None:
    assert post(url, "/abort_request", {"rid": "nobody"})[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b"{}",
        {"input_ids": []},
        {"input_ids": [1, "a"]},
        {"input_ids": [10**9]},
        {"input_ids": IDS, "text": "both"},
        {"input_ids": IDS, "sampling_params": {"temperature": -1}},
        {"input_ids": IDS, "sampling_params": {"no_such_thing": 1}},
        {"input_ids": IDS, "sampling_params": {"repetition_penalty": 1.2}},
        {"input_ids": IDS, "sampling_params": {"n": 2}},
        {"input_ids": [IDS, IDS], "rid": ["a", "a"]},
        {"input_ids": IDS, "stream": True},
    ],
)
def test_a_malformed_request_is_a_400_with_a_message(url: str, body: Any) -> None:
    status, answer = post(url, "/generate", body)
    assert status == 400
    assert answer["error"]["message"]


def test_a_capture_answers_with_its_spool_file_and_never_a_clients_path(url: str) -> None:
    status, answer = generate(
        url,
        rid="../../etc/passwd",
        return_hidden_states=True,
        sampling_params={"max_new_tokens": 1, "custom_params": {"datagen": True}},
    )
    assert status == 200
    (note,) = answer["meta_info"]["datagen"]
    path = Path(note["path"])
    assert path == spool_path(path.parent, "../../etc/passwd")
    assert (note["rows"], note["width"]) == (len(IDS), (len(BOUNDARIES) + 1) * HIDDEN)
    assert note["boundaries"] == list(BOUNDARIES)


def test_the_servers_papers_name_model_and_limits(url: str) -> None:
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        info = json.load(answer)
    assert info["served_model_name"] == "tiny-llama"
    assert info["context_length"] == CONTEXT
    assert info["dtype"] == "float32"
    assert info["max_running_requests"] > 0
    with urllib.request.urlopen(f"{url}/model_info", timeout=60) as answer:
        assert json.load(answer)["is_generation"] is True


def test_tokenize_gives_the_ids_of_a_chat_without_answering_it(url: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Name three rivers."}]}
    status, tokenized = post(url, "/v1/tokenize", asked)
    chat = post(url, "/v1/chat/completions", {**asked, "max_tokens": 1, "return_token_ids": True})[
        1
    ]
    assert status == 200
    assert tokenized["tokens"] == chat["choices"][0]["prompt_token_ids"]
    assert tokenized["count"] == len(tokenized["tokens"])


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "hello"},
        {"prompt": "hello"},
        {"tools": [{"function": {}}]},
        {"tools": "tide"},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_a_400(url: str, change: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello."}], **change}
    status, answer = post(url, "/v1/tokenize", asked)
    assert status == 400
    assert answer["error"]["message"]
