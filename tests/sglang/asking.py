"""Requests to a server, real text to ask about, and the reference that captures must equal."""

from __future__ import annotations

import asyncio
import functools
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from datagen.capture.spool import SpoolFile
from datagen.embedded.weights import ensure_checkpoint
from datagen.target.chat import CHAT, TOKENIZE
from datagen.target.checks.subject import EMBEDDED
from datagen.target.client import SGLangClient
from datagen.target.profile import Profile
from datagen.target.tokens import Message, TemplateRenderer

ROOT = Path(__file__).resolve().parents[2]


def post(url: str, path: str, body: Any, timeout: float = 1800) -> tuple[int, Any]:
    """Status and body of one call."""
    asked = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            raw = answer.read()
            return answer.status, json.loads(raw) if raw else None
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.loads(e.read())


def generate(url: str, ids: Sequence[int], **body: Any) -> tuple[int, Any]:
    """`/generate`, greedy."""
    params = {"temperature": 0, "max_new_tokens": 8, **body.pop("sampling_params", {})}
    return post(url, "/generate", {"input_ids": list(ids), "sampling_params": params, **body})


def capture(url: str, ids: Sequence[int], rid: str = "", **body: Any) -> tuple[int, Any]:
    """A capture as the collector asks for it."""
    rid = rid or uuid.uuid4().hex
    params = {
        "max_new_tokens": 1, "custom_params": {"datagen": True}, **body.pop("sampling_params", {})
    }  # fmt: skip
    body = {"rid": rid, "extra_key": rid, "return_hidden_states": True, **body}
    return generate(url, ids, sampling_params=params, **body)


@functools.cache
def renderer() -> TemplateRenderer:
    """SmolLM2's, loaded once."""
    return TemplateRenderer(ensure_checkpoint())


def conversations(n: int, longest: int) -> list[list[int]]:
    """`n` different contexts of real text through the chat template, 20 to `longest` tokens."""
    texts = [
        line.strip()
        for name in ("README.md", "docs/architecture.md", "prompts/README.md", "LICENSE")
        for line in (ROOT / name).read_text(encoding="utf-8").split("\n\n")
        if len(line.split()) > 4
    ]
    found = []
    for i in range(n):
        text = f"Note {i}. " + "\n".join(texts[(i * 7 + k) % len(texts)] for k in range(1 + i % 4))
        ids = renderer().render([{"role": "user", "content": text}], None, None)
        found.append(ids[: 20 + (i * 53) % (longest - 19)])
    return found


@functools.cache
def is_before(url: str, release: str) -> bool:
    """Whether a server is an SGLang older than that; the embedded target is like the newest."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        info = json.load(answer)
    return info.get("engine") != EMBEDDED and Version(info["version"]) < Version(release)


def rendered_at(
    url: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    kwargs: dict[str, Any] | None = None,
    *,
    names_length: bool = False,
) -> list[int]:
    """As a run has it rendered: by `/v1/tokenize`, which before 0.5.19 needs a tokenizer with a length.

    `names_length`: the served one does.
    """

    async def asked() -> list[int]:
        async with SGLangClient(url) as client:
            ids = await client.render(messages, tools, kwargs or {})
            fails = is_before(url, "0.5.19") and not names_length
            assert client.chats.route == (CHAT if fails else TOKENIZE)
            return ids

    return asyncio.run(asked())


class Reference:
    """Hugging Face's own forward of the same checkpoint, in float32."""

    def __init__(self, profile: Profile) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._profile = profile
        self._model = AutoModelForCausalLM.from_pretrained(
            ensure_checkpoint(), dtype=torch.float32
        ).eval()

    @torch.no_grad()
    def rows(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, K+1, hidden]: the boundaries, then the state after the final norm."""
        out = self._model(torch.tensor([list(ids)]), output_hidden_states=True)
        states = [out.hidden_states[b][0] for b in self._profile.boundaries]
        return torch.stack([*states, out.hidden_states[-1][0]], dim=1)

    @torch.no_grad()
    def next_token(self, final_H: torch.Tensor) -> int:
        """argmax of lm_head over a final state."""
        return int((self._model.lm_head.weight @ final_H.float()).argmax())


def rows_of_spool(spooled: SpoolFile) -> torch.Tensor:
    """float32 [tokens, K+1, hidden] of a spool file in bf16."""
    bits = np.frombuffer(spooled.rows, dtype=np.int16).copy()
    values = torch.from_numpy(bits).view(torch.bfloat16).float()
    return values.view(spooled.n_tokens, -1, spooled.hidden)
