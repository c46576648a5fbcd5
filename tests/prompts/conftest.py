"""A small mix on disk, and a counter that stands for a tokenizer: one token a word, five a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from datagen.prompts.mix import Mix, load_mix
from datagen.target.profile import Profile, load_profile
from datagen.target.tokens import Conversation

MakeMix = Callable[..., Mix]


class WordCounter:
    """Counts what it is shown; deterministic, and quick."""

    digest = "words"

    def __init__(self) -> None:
        self.counted = 0

    def count_many(self, conversations: Sequence[Conversation]) -> list[int]:
        self.counted += len(conversations)
        return [
            sum(5 + len(m["content"].split()) for m in messages) + len(json.dumps(tools or "")) // 8
            for messages, tools, _thinking in conversations
        ]


@pytest.fixture
def counter() -> WordCounter:
    return WordCounter()


@pytest.fixture
def profile() -> Profile:
    return load_profile("smollm2")


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; bytes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in rows
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    """A row of user turns."""
    return {"messages": [{"role": "user", "content": t} for t in turns], **more}


def sentence(i: int) -> str:
    """A prompt unlike every other: no word but the frame is shared."""
    return f"question {i}: " + " ".join(f"w{i}x{k}" for k in range(12))


@pytest.fixture
def make_mix(tmp_path: Path) -> MakeMix:
    """Writes mixes/<name>.yaml below tmp_path and loads it; data files are relative to tmp_path."""

    def make(sources: list[dict[str, Any]], name: str = "small", **settings: Any) -> Mix:
        def plain(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{"licence": "MIT", **s} for s in group]

        content: dict[str, Any] = {"version": 1, "sources": plain(sources), **settings}
        held = settings.get("heldout", {}).get("sources", [])
        if held:
            content["heldout"] = {**settings["heldout"], "sources": plain(held)}
        content.setdefault("total", sum(s["count"] for s in [*sources, *held]))
        path = tmp_path / "mixes" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return load_mix(str(path))

    return make
