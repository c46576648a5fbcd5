"""Whose token ids: ours where the server's chat endpoint makes the same, else the server's, and proven."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from datagen.cli.app import app
from datagen.collect.conversation import row_seed
from datagen.collect.job import CollectJob
from datagen.collect.proof import preflight, rendering_of
from datagen.config import collect_config
from datagen.errors import FingerprintMismatch, PreflightRed
from datagen.prompts.turns import answer_message
from datagen.store.fingerprint import Fingerprint
from datagen.store.layout import RunLayout
from datagen.store.manifest import Manifest
from datagen.store.plan import Plan
from datagen.store.responses import Response, ResponsesReader
from datagen.store.verify import verify_run
from datagen.target.checks.renderings import TIDES, TOOLS, conversations
from datagen.target.checks.subject import QUICK
from datagen.target.checks.suite import NAMES
from datagen.target.checks.verdict import ServerChecks
from datagen.target.client import SGLangClient, Timeouts
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure
from tests.kimi import THINK_END, token_id, write_kimi_checkpoint
from tests.target.faulty import faulty
from tests.tiny import write_tiny_profile

TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Name three rivers in Peru."}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Write a haiku about rain."},
            {"role": "user", "content": "Then another one about snow."},
        ]
    },
    {"messages": TIDES[:2], "tools": TOOLS},
    {"messages": TIDES, "tools": TOOLS},
    {"messages": [*TIDES, {"role": "user", "content": "And in Genoa?"}], "tools": TOOLS},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_checkpoint(tmp_path_factory.mktemp("kimi") / "tiny-kimi")


@pytest.fixture(scope="module")
def typescript(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that declares tools as Kimi-K2.5's does."""
    with faulty(checkpoint, tmp_path_factory.mktemp("ts"), "tools_as_typescript") as url:
        yield url


@pytest.fixture(scope="module")
def no_tokenize(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same in a release whose tokenize route fails over Kimi's tokenizer."""
    with faulty(checkpoint, tmp_path_factory.mktemp("nt"), "tokenize_fails") as url:
        yield url


def profile_of(checkpoint: Path, folder: Path, url: str) -> Path:
    return write_tiny_profile(
        folder / "profile.yaml", checkpoint, url, thinking_kwarg="thinking", reasoning_end=THINK_END,
        stop_token_ids=[token_id(checkpoint, "<|im_end|>")], max_new_tokens=24,
        sampling={"train": {"temperature": 1.5}},
    )  # fmt: skip


def settings(checkpoint: Path, folder: Path, url: str, **changes: Any) -> dict[str, Any]:
    return {
        "run": str(folder / "run"), "target": str(profile_of(checkpoint, folder, url)),
        "tokenizer": str(checkpoint), "spool_mib": 64, "partition_prompts": 4, "loop_tokens": 0,
        **changes,
    }  # fmt: skip


def write_mix(folder: Path) -> Path:
    """The talks, twice with other words, and one held out; thinking on in about half of them."""
    for name, talks in (("train", TALKS * 2), ("heldout", TALKS[:1])):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for i, talk in enumerate(talks):
                first, *rest = talk["messages"]
                words = f"{name} {i}: {first['content']}"
                row = {**talk, "id": f"{name}{i}", "messages": [{**first, "content": words}, *rest]}
                file.write(json.dumps(row) + "\n")
    source = {"adapter": "openai", "licence": "Apache-2.0"}
    mix = {
        "version": 1, "total": 2 * len(TALKS) + 1, "thinking": {"on_share": 0.5}, "dedup": {"near": None},
        "sources": [{"name": "train", "file": "train.jsonl", "count": 2 * len(TALKS), **source}],
        "heldout": {"sources": [{"name": "heldout", "file": "heldout.jsonl", "count": 1, **source}]},
    }  # fmt: skip
    path = folder / "mix.yaml"
    path.write_text(json.dumps(mix))
    return path


def checked(config: dict[str, Any]) -> ServerChecks:
    return asyncio.run(preflight(collect_config(**config), print, effort=QUICK, names=NAMES))[0]


def result(place: ServerChecks, name: str) -> tuple[str, str, str]:
    (found,) = [r for r in place.results if r.name == name]
    return found.status, found.measured, str(found.fix)


async def collected(config: dict[str, Any]) -> Manifest:
    async with CollectJob.open(collect_config(**config), print) as job:
        return await job.collect_all()


def stored(root: Path) -> dict[str, Response]:
    layout = RunLayout(root)
    return {
        response.sample_id: response
        for index in range(Plan.open(layout.plan).n_partitions)
        for number in layout.partition(index).numbers("responses")
        for response in ResponsesReader(layout.partition(index).responses(number))
    }


def asked(url: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_server_that_renders_alike_leaves_rendering_to_us(
    checkpoint: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "no-tool-calls"
    write_kimi_checkpoint(plain)
    path = plain / "tokenizer_config.json"
    given = json.loads(path.read_text())
    for shown, constant in (
        ("given if given is string", "'{}' if given"),
        ("tools | tojson", "'x'"),
    ):
        assert shown in given["chat_template"]
        given["chat_template"] = given["chat_template"].replace(shown, constant)
    path.write_text(json.dumps(given))
    with faulty(plain, tmp_path, "") as url:
        place = checked(settings(plain, tmp_path, url))
    status, measured, _ = result(place, "rendering")
    assert (status, place.rendering) == ("ok", "ours")
    assert measured.startswith(f"rendered here: {len(conversations('thinking'))} conversations")
    assert not place.reds()


def test_a_server_that_renders_tools_in_its_own_code_renders_the_run(
    checkpoint: Path, tmp_path: Path, typescript: str
) -> None:
    place = checked(settings(checkpoint, tmp_path, typescript))
    status, measured, _ = result(place, "rendering")
    assert (status, place.rendering) == ("ok", "server")
    assert measured.startswith("rendered by the server")
    assert "'tools' differs from token" in measured
    assert not place.reds()
    status, measured, fix = result(
        checked(settings(checkpoint, tmp_path, typescript, rendering="ours")), "rendering"
    )
    assert status == "red"
    assert "'tools' differs from token" in measured
    assert "--rendering server" in fix


def test_where_the_tokenize_route_fails_chats_of_one_token_tell_the_ids(
    checkpoint: Path, tmp_path: Path, typescript: str, no_tokenize: str
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="500"):
        asked(no_tokenize, "/v1/tokenize", {"messages": TIDES, "tools": TOOLS})
    place = checked(settings(checkpoint, tmp_path, no_tokenize))
    status, measured, _ = result(place, "rendering")
    assert (status, place.rendering) == ("ok", "server")
    assert "(by chats of one token: /v1/tokenize answers 500)" in measured
    assert not place.reds()
    usual = checked(settings(checkpoint, tmp_path, typescript))
    assert place.contexts_sha256 == usual.contexts_sha256, "a run may go on in either release"


async def test_a_server_that_fails_in_both_routes_is_asked_for_its_tokenize_route_again() -> None:
    broken = [True]

    async def tokenize(_: web.Request) -> web.Response:
        return web.json_response({"tokens": [1, 2]}, status=500 if broken[0] else 200)

    async def chat(_: web.Request) -> web.Response:
        raise web.HTTPServiceUnavailable

    routes = web.Application()
    routes.router.add_post("/v1/tokenize", tokenize)
    routes.router.add_post("/v1/chat/completions", chat)
    async with TestServer(routes) as server, SGLangClient(str(server.make_url(""))) as client:
        with pytest.raises(CapacityFailure, match="503"):
            await client.render([{"role": "user", "content": "Hello"}], None, {})
        broken[0] = False
        assert await client.render([{"role": "user", "content": "Hello"}], None, {}) == [1, 2]


def test_what_sglang_does_before_its_template_makes_the_server_render(
    checkpoint: Path, tmp_path: Path
) -> None:
    """It adds a key to every tool, and parses the arguments of calls: `{"a":1}` becomes `{"a": 1}`."""
    with faulty(checkpoint, tmp_path, "") as url:
        place = checked(settings(checkpoint, tmp_path, url))
        body = {"messages": TIDES, "tools": TOOLS}
        text = _text(checkpoint, asked(url, "/v1/tokenize", body)["tokens"])
    assert place.rendering == "server"
    assert "'tools' differs from token" in result(place, "rendering")[1]
    assert '"defer_loading": null' in text
    assert '{"harbour": "Brest"}' in text


@pytest.mark.parametrize("release", ["typescript", "no_tokenize"])
def test_a_run_rendered_by_the_server_holds_the_chat_endpoints_ids(
    checkpoint: Path, tmp_path: Path, release: str, request: pytest.FixtureRequest
) -> None:
    typescript: str = request.getfixturevalue(release)
    config = settings(checkpoint, tmp_path, typescript, mix=str(write_mix(tmp_path)))
    manifest = asyncio.run(collected(config))
    root = tmp_path / "run"
    assert verify_run(root).ok
    assert manifest.target["rendering"] == "server"
    assert manifest.preflight["rendering"] == "server"
    assert Fingerprint.load(root / "fingerprint.json").fields["target"]["rendering"] == "server"
    responses = stored(root)
    seen, thought = 0, set()
    for prompt in Plan.open(root / "plan.arrow").rows():
        messages: list[dict[str, Any]] = []
        segments = _segments(json.loads(prompt.messages))
        for turn, segment in enumerate(segments):
            messages += segment
            response = responses[f"{prompt.prompt_id}-{turn}"]
            chat = asked(
                typescript, "/v1/chat/completions",
                {
                    "messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True,
                    **({"tools": json.loads(prompt.tools)} if prompt.tools else {}),
                    "chat_template_kwargs": {"thinking": prompt.thinking},
                },
            )["choices"][0]  # fmt: skip
            assert response.context_ids.tolist() == chat["prompt_token_ids"]
            drawn = prompt.split == "train"
            again = asked(
                typescript, "/generate",
                {
                    "input_ids": chat["prompt_token_ids"],
                    "sampling_params": {
                        "max_new_tokens": 24, "temperature": 1.5 if drawn else 0,
                        "stop_token_ids": [token_id(checkpoint, "<|im_end|>")],
                        **(
                            {"sampling_seed": row_seed(0, prompt.prompt_id, turn)} if drawn else {}
                        ),
                    },
                },
            )  # fmt: skip
            assert response.response_ids.tolist() == again["output_ids"]
            messages.append(
                answer_message(response.text, reasoning_end=THINK_END, thinking=prompt.thinking)
            )
            seen += 1
            thought.add(prompt.thinking)
    assert seen == len(responses) == manifest.samples.collected
    assert thought == {True, False}
    assert any(
        "namespace functions" in _text(checkpoint, r.context_ids.tolist())
        for r in responses.values()
    )


def test_who_renders_is_part_of_what_a_run_is(
    checkpoint: Path, tmp_path: Path, typescript: str
) -> None:
    config = settings(checkpoint, tmp_path, typescript, mix=str(write_mix(tmp_path)), limit=3)
    asyncio.run(collected(config))
    assert asyncio.run(collected({**config, "rendering": "server"}))
    with pytest.raises(FingerprintMismatch, match=r"target\.rendering is absent, was 'server'"):
        asyncio.run(collected({**config, "rendering": "ours"}))


def test_a_run_goes_on_only_where_the_server_renders_as_it_did(
    checkpoint: Path, tmp_path: Path, typescript: str
) -> None:
    config = settings(
        checkpoint, tmp_path, typescript, mix=str(write_mix(tmp_path)), limit=3, rendering="server"
    )

    async def opened(endpoint: str) -> None:
        async with CollectJob.open(collect_config(**config, endpoints=endpoint), print):
            pass

    asyncio.run(opened(typescript))
    with (
        faulty(checkpoint, tmp_path, "") as url,  # as after a restart with another template
        pytest.raises(FingerprintMismatch, match="renders conversations otherwise than when"),
    ):
        asyncio.run(opened(url))
    asyncio.run(opened(typescript))


def test_contexts_without_tools_are_the_same_rows_whoever_renders(
    checkpoint: Path, tmp_path: Path, typescript: str
) -> None:
    mix = str(write_mix(tmp_path))
    rows = {}
    for who in ("ours", "server"):
        config = settings(checkpoint, tmp_path, typescript, mix=mix, rendering=who)
        config |= {"run": str(tmp_path / who), "accept_risk": "rendering"}
        asyncio.run(collected(config))
        rows[who] = {
            name: (r.context_ids.tolist(), r.response_ids.tolist(), r.seed)
            for name, r in stored(tmp_path / who).items()
        }
    assert rows["ours"].keys() == rows["server"].keys()
    same = {name for name, row in rows["ours"].items() if row == rows["server"][name]}
    bare = {
        f"{p.prompt_id}-{turn}"
        for p in Plan.open(tmp_path / "ours" / "plan.arrow").rows()
        if not p.tools
        for turn in range(p.n_turns)
    }
    assert bare <= same
    assert len(same) < len(rows["ours"])


def test_servers_that_render_differently_do_not_serve_one_run(
    checkpoint: Path, tmp_path: Path, typescript: str
) -> None:
    with faulty(checkpoint, tmp_path, "") as url:
        config = settings(
            checkpoint, tmp_path, typescript, mix=str(write_mix(tmp_path)),
            endpoints=f"{typescript},{url}",
        )  # fmt: skip
        with pytest.raises(PreflightRed, match="renders the probe conversations otherwise than"):
            asyncio.run(collected(config))
        names = ("target", "tokenizer", "endpoints")
        flags = [word for name in names for word in (f"--{name}", config[name])]
        done = CliRunner().invoke(
            app, ["preflight", *flags, "--spool-mib", "64", "--quick", "--json"]
        )
    assert not (tmp_path / "run" / "plan.arrow").exists(), "nothing is planned"
    assert isinstance(done.exception, PreflightRed)
    assert json.loads(done.stdout)["ok"] is False


def place(where: str, rendering: Literal["ours", "server"] | None, ids: str | None) -> ServerChecks:
    return ServerChecks(where, (), 0.0, rendering=rendering, rendered_sha256=ids)


def test_a_server_that_tells_no_ids_is_not_trusted_to_render_as_the_others_do() -> None:
    told, untold = place("http://a", "server", "x"), place("http://b", "ours", None)
    with pytest.raises(PreflightRed, match=r"tells no prompt ids.*http://b"):
        rendering_of([told, untold])
    assert rendering_of([told, place("http://c", None, None)]) == "server", "it only captures"
    assert rendering_of([untold, place("http://c", None, None)]) == "ours"


def test_where_the_risk_is_accepted_a_server_renders_whose_ids_nobody_knows() -> None:
    unknown = place("http://a", "server", None)
    assert rendering_of([unknown, place("this machine", None, None)]) == "server"
    assert rendering_of([unknown, place("http://b", "server", "x")]) == "server"
    with pytest.raises(PreflightRed, match="otherwise than http://b"):
        rendering_of([unknown, place("http://b", "server", "x"), place("http://c", "server", "y")])
    seen = [replace(unknown, contexts_sha256=ids) for ids in ("x", "y")]
    with pytest.raises(
        PreflightRed, match="for a run it renders the probe conversations otherwise"
    ):
        rendering_of(seen)


@pytest.mark.parametrize(
    "answer",
    [7, {}, {"choices": {}}, {"choices": {"message": 1}}, {"choices": [7]},
     {"choices": [{"prompt_token_ids": [1, "2"]}]}],
)  # fmt: skip
async def test_a_chat_that_tells_no_ids_is_a_failure_of_its_request(answer: Any) -> None:
    async def chat(_: web.Request) -> web.Response:
        return web.json_response(answer)

    with pytest.raises(RowFailure, match="no list of ids"):
        await chat_of_one_token(chat)


async def test_a_chat_that_is_not_answered_in_time_is_a_failure_of_its_request() -> None:
    ended = asyncio.Event()

    async def chat(_: web.Request) -> web.Response:
        await ended.wait()
        return web.json_response({})

    with pytest.raises(EndpointFailure, match="no answer of /v1/chat"):
        await chat_of_one_token(chat, ended.set)


async def chat_of_one_token(
    chat: Callable[[web.Request], Awaitable[web.Response]], after: Callable[[], None] = lambda: None
) -> None:
    routes = web.Application()
    routes.router.add_post("/v1/chat/completions", chat)
    async with TestServer(routes) as server:
        url = str(server.make_url(""))
        async with SGLangClient(url, timeouts=Timeouts(row=0.2)) as client:
            try:
                await client.chats.prompt_ids([{"role": "user", "content": "Hello"}], None, {})
            finally:
                after()


def test_reasoning_does_not_stand_in_a_later_turns_context_as_the_answer() -> None:
    def split(text: str, thinking: bool | None) -> dict[str, Any]:
        return answer_message(text, reasoning_end=THINK_END, thinking=thinking)

    assert split("I think.</think>Four.", True) == {
        "role": "assistant", "content": "Four.", "reasoning_content": "I think.",
    }  # fmt: skip
    assert split("<think>I think.</think>Four.", True) == split("I think.</think>Four.", True)
    assert split("cut while", None)["content"] == ""
    assert split("Four.", False) == {"role": "assistant", "content": "Four."}
    assert answer_message("a</think>b") == {"role": "assistant", "content": "a</think>b"}


def _segments(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """A skeleton cut before every user message but the first."""
    segments: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "user" and any(m["role"] == "user" for m in segments[-1]):
            segments.append([])
        segments[-1].append(message)
    return segments


def _text(checkpoint: Path, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return str(tokenizer.decode(ids))
