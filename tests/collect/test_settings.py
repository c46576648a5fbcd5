"""Settings that cannot be meant end in one line, at once, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from datagen.cli.app import app as cli
from datagen.config import collect_config
from datagen.errors import ConfigError, EndpointDown
from datagen.fanout.rows import Role
from datagen.target.client import API_KEY, SGLangClient
from tests.collect.harness import Bench


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpoints": "http://"}, "is no URL"),
        ({"endpoints": "http://host:99999"}, "is no URL"),
        ({"endpoints": "http://[::1"}, "is no URL"),
        ({"endpoints": "http://no such host:80"}, "is no URL"),
        ({"run": ""}, "is no name of a run"),
        ({"run": ".."}, "is no name of a run"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        collect_config(**given)


def test_an_endpoint_given_once_for_each_role_has_both() -> None:
    config = collect_config(endpoints="generate=http://a:1,capture=http://a:1/,capture=http://b:1")
    assert config.endpoints == ("http://a:1", "http://b:1")
    assert config.role("http://a:1") is Role.BOTH
    assert config.role("http://b:1") is Role.CAPTURE


@pytest.mark.parametrize("place", ["file", "file/run"])
async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, place: str) -> None:
    bench = Bench.make(tmp_path, "http://127.0.0.1:9", prompts=4)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the run's directory cannot be made"):
        await bench.collect_here(place)


def test_boundaries_that_are_no_numbers_are_named() -> None:
    done = CliRunner().invoke(cli, ["serve", "--boundaries", "1,x"])
    assert isinstance(done.exception, ConfigError)
    assert "'1,x' are no layer numbers" in str(done.exception)


async def test_the_key_of_the_environment_is_sent_and_a_wrong_one_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def info(request: web.Request) -> web.Response:
        asked.append(request.path)
        allowed = request.headers.get("Authorization") == "Bearer right"
        return web.json_response({"version": "0.5.23"}, status=200 if allowed else 401)

    app = web.Application()
    app.router.add_get("/server_info", info)
    async with TestServer(app) as server:
        for key, said in (("", "asks for an API key"), ("wrong", "refuses the API key")):
            monkeypatch.setenv(API_KEY, key)
            async with SGLangClient(str(server.make_url(""))) as client:
                with pytest.raises(EndpointDown, match=said) as refused:
                    await client.server_info()
            assert len(asked) == 1, "at once, not after patience with a server that starts"
            asked.clear()
            assert API_KEY in str(refused.value)
        monkeypatch.setenv(API_KEY, "right")
        async with SGLangClient(str(server.make_url(""))) as client:
            assert (await client.server_info())["version"] == "0.5.23"
