"""Conversations to token ids, by the target's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from datagen.errors import ConfigError

Message = dict[str, Any]
Conversation = tuple[list[Message], list[dict[str, Any]] | None, bool | None]
Rendering = Literal["auto", "ours", "server"]
"""Whose token ids a context has: rendered here, by the server, or here unless the server's differ."""
IDENTITY_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tiktoken.model",
    "special_tokens_map.json",
)  # fmt: skip


def template_kwargs(thinking_kwarg: str | None, thinking: bool | None) -> dict[str, Any]:
    """What a template is told beside the messages: the thinking switch, where it is set."""
    if thinking_kwarg is None or thinking is None:
        return {}
    return {thinking_kwarg: thinking}


class Renderer(Protocol):
    """Renders conversations to the ids that the target is asked with."""

    @property
    def digest(self) -> str:
        """sha256 of everything that decides the ids: vocabulary, merges, template."""
        ...

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, thinking: bool | None
    ) -> list[int]:
        """Ids of the conversation and of the generation prompt that follows it."""
        ...

    def count_many(self, conversations: Sequence[Conversation]) -> list[int]:
        """Lengths of many renderings, in order."""
        ...


class TemplateRenderer:
    """A checkpoint's tokenizer and chat template, through transformers."""

    def __init__(
        self,
        source: str | Path,
        *,
        thinking_kwarg: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoTokenizer  # a second of imports, paid only when used

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(source), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"no tokenizer can be loaded: {str(e).splitlines()[0] if str(e) else e!r}",
                where=source,
                fix="give a directory that holds the target's tokenizer, with --tokenizer",
            ) from e
        if not self._tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template", where=source)
        self._thinking_kwarg = thinking_kwarg
        self._digest = self._identity(Path(source))

    @property
    def digest(self) -> str:
        """sha256 over the tokenizer's files, or over vocabulary and template when they are not local."""
        return self._digest

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, thinking: bool | None
    ) -> list[int]:
        """Ids of the conversation and of the generation prompt that follows it."""
        text = self._text(messages, tools, thinking)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def count_many(self, conversations: Sequence[Conversation]) -> list[int]:
        """Lengths of many renderings, in order; texts are encoded as one batch."""
        texts = [self._text(*c) for c in conversations]
        if not texts:
            return []
        batch: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [len(ids) for ids in batch]

    def text_of(self, ids: Sequence[int]) -> str:
        """What a run of tokens says, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _text(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, thinking: bool | None
    ) -> str:
        extra = template_kwargs(self._thinking_kwarg, thinking)
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **extra
        )
        return text

    def _identity(self, source: Path) -> str:
        found = tokenizer_files_digest(source)
        if found is not None:
            return found
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(
            repr((vocabulary, self._tokenizer.chat_template)).encode()
        ).hexdigest()


def tokenizer_files_digest(directory: Path) -> str | None:
    """sha256 over the names and bytes of a directory's tokenizer files; None when it has none."""
    sha = hashlib.sha256()
    files = [directory / name for name in IDENTITY_FILES if (directory / name).is_file()]
    for path in files:
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest() if files else None
