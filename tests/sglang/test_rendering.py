"""Conversations as SGLang renders them, by chat and by tokenize, are what the embedded target renders.

Over Kimi's turn layout, whose template shows what SGLang does to messages and tools before it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from datagen.collect.proof import preflight
from datagen.config import collect_config
from datagen.embedded.chat import ChatTemplate, rendered
from datagen.target.chat import chat_body
from datagen.target.checks.renderings import conversations
from datagen.target.checks.subject import QUICK
from datagen.target.checks.suite import NAMES
from datagen.target.tokens import template_kwargs
from tests.kimi import token_id, write_kimi_checkpoint
from tests.sglang.asking import is_before, post, rendered_at
from tests.sglang.conftest import CAPTURE_FLAGS, RealEngine
from tests.sglang.server import SGLangServer
from tests.tiny import BOUNDARIES, write_tiny_profile

THINKING = "thinking"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_checkpoint(tmp_path_factory.mktemp("kimi") / "tiny-kimi")


def test_both_render_alike_and_preflight_has_the_server_render(
    real_engine: RealEngine, checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    template = ChatTemplate.found(checkpoint, tokenizer)
    assert template is not None
    server = SGLangServer(
        real_engine.installed, real_engine.site, checkpoint, tmp_path, *CAPTURE_FLAGS,
        DATAGEN_CAPTURE_DIR=str(tmp_path / "spool"),
        DATAGEN_CAPTURE_BOUNDARIES=",".join(map(str, BOUNDARIES)),
    )  # fmt: skip
    try:
        server.start()
        for name, (messages, tools, thinking) in conversations(THINKING).items():
            kwargs = template_kwargs(THINKING, thinking)
            body = chat_body(messages, tools, kwargs)
            asked = {**body, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
            status, chat = post(server.url, "/v1/chat/completions", asked)
            assert status == 200, chat
            told = chat["choices"][0]["prompt_token_ids"]
            found = rendered_at(server.url, messages, tools, kwargs, names_length=True)
            assert found == told, name
            if tools and is_before(server.url, "0.5.18"):
                continue  # tools come with other keys, in another order
            assert rendered(body, template) == told, (
                f"{name}: {tokenizer.decode(rendered(body, template), skip_special_tokens=False)} "
                f"is not {tokenizer.decode(told, skip_special_tokens=False)}"
            )
        profile = write_tiny_profile(
            tmp_path / "profile.yaml", checkpoint, server.url, thinking_kwarg=THINKING,
            stop_token_ids=[token_id(checkpoint, "<|im_end|>")],
        )  # fmt: skip
        config = collect_config(
            target=str(profile), tokenizer=str(checkpoint), runs_dir=str(tmp_path), spool_mib=64
        )
        (place, _) = asyncio.run(preflight(config, print, effort=QUICK, names=NAMES))
    finally:
        server.stop()
    found = {r.name: r for r in place.results}
    for r in place.results:
        print(f"{r.name:14} {r.status:8} {r.measured}")
    assert found["rendering"].status == "ok"
    assert place.rendering == "server"
    assert "'tools' differs from token" in found["rendering"].measured
    assert found["thinking"].status == "ok"
