"""What clients of SGLang rely on, asked of a running server."""

from __future__ import annotations

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
from tests.tiny import BOUNDARIES, CONTEXT, HIDDEN, serving, write_tiny_checkpoint

IDS = [1, 40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("api")
    with serving(str(write_tiny_checkpoint(folder / "tiny-llama")), folder) as process:
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


def test_a_request_id_in_flight_is_refused_and_can_be_aborted(url: str) -> None:
    endless = {"max_new_tokens": 900, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        first = pool.submit(generate, url, rid="same", sampling_params=endless)
        while running(url) == 0:
            assert not first.done()
            time.sleep(0.005)
        status, refused = generate(url, rid="same", sampling_params={"max_new_tokens": 1})
        assert post(url, "/abort_request", {"rid": "same"})[0] == 200
        assert first.result(60)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert status == 400
    assert "Duplicate request ID detected" in refused["error"]["message"]


def running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/server_info", timeout=10) as answer:
        return int(json.load(answer)["internal_states"][0]["num_running_reqs"])


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
        {"input_ids": IDS, "return_hidden_states": True},
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
    with urllib.request.urlopen(f"{url}/server_info", timeout=10) as answer:
        info = json.load(answer)
    assert info["served_model_name"] == "tiny-llama"
    assert info["context_length"] == CONTEXT
    assert info["dtype"] == "float32"
    assert info["max_running_requests"] > 0
    with urllib.request.urlopen(f"{url}/model_info", timeout=10) as answer:
        assert json.load(answer)["is_generation"] is True
