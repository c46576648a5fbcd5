"""`/v1/chat/completions` and `/v1/tokenize`, as far as a client needs them that asks for renderings.

The checkpoint's chat template runs in a sandbox of its own; whoever renders with transformers is thereby
compared with other code than itself.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from datagen.embedded.requests import BadRequest
from datagen.errors import ConfigError

RENDERED = {"model", "messages", "tools", "chat_template_kwargs"}
TAKEN = RENDERED | {
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "return_token_ids",
    "rid", "stream",
}  # fmt: skip


class ChatTemplate:
    """A checkpoint's template and special tokens."""

    def __init__(self, source: str, settings: dict[str, Any], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(source)
        self._special = {
            name: value.get("content") if isinstance(value, dict) else value
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (value := settings.get(name)) is not None
        }

    @classmethod
    def found(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint directory, or None. Raises ConfigError when it is broken."""
        path = directory / "tokenizer_config.json"
        if not path.is_file():
            return None
        beside = directory / "chat_template.jinja"
        try:
            settings = json.loads(path.read_text("utf-8"))
            source = (
                beside.read_text("utf-8") if beside.is_file() else settings.get("chat_template")
            )
            return None if source is None else cls(source, settings, tokenizer)
        except (OSError, ValueError, TemplateError) as e:
            raise ConfigError(f"no chat template can be read: {e}", where=path) from e

    def ids(self, messages: list[dict[str, Any]], tools: Any, extra: dict[str, Any]) -> list[int]:
        """Token ids of a conversation and the generation prompt after it. Raises BadRequest."""
        try:
            text = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True,
                **{**self._special, **extra},
            )  # fmt: skip
        except (TemplateError, TypeError) as e:
            raise BadRequest(f"The chat template refuses the messages: {e}") from e
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def tokenized(body: Any, template: ChatTemplate, context_length: int) -> dict[str, Any]:
    """The answer of `/v1/tokenize` to messages. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    unknown = body.keys() - RENDERED
    if unknown:
        raise BadRequest(f"The field '{min(unknown)}' is not supported by this server.")
    ids = rendered(body, template)
    return {"tokens": ids, "count": len(ids), "max_model_len": context_length}


def rendered(body: dict[str, Any], template: ChatTemplate) -> list[int]:
    """The ids of a conversation. Raises BadRequest."""
    messages, extra = body.get("messages"), body.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages must be a list of objects.")
    if not messages or not isinstance(extra, dict):
        raise BadRequest("messages must not be empty, chat_template_kwargs must be an object.")
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools must be a list of objects.")
    return template.ids(
        [_message(m) for m in messages], [_tool(t) for t in tools] if tools else None, extra
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as SGLang hands it to the template: arguments of tool calls as objects, no nulls."""
    plain = {k: v for k, v in message.items() if v is not None}
    plain.setdefault("content", "")
    if plain.get("role") != "assistant" or not isinstance(plain.get("tool_calls"), list):
        return plain
    try:
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        raise BadRequest(f"tool_calls cannot be read: {e!r}") from e
    return plain


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"].get("name"), "arguments": call["function"]["arguments"]}
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": function,
    }


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as SGLang 0.5.23 hands it to the template: keys as sent, then the ones it knows of."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("tools must hold functions with a name.")
    known = {k: function.get(k) for k in ("description", "name", "parameters")}
    sent = {k: v for k, v in function.items() if k in known or (k == "strict" and v is not None)}
    return {
        "type": "function",
        "function": sent | {k: v for k, v in known.items() if k not in sent},
        "defer_loading": tool.get("defer_loading"),
    }


def native_body(body: Any, template: ChatTemplate) -> dict[str, Any]:
    """The `/generate` request that a chat request amounts to. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    unknown = body.keys() - TAKEN
    if unknown:
        raise BadRequest(f"The field '{min(unknown)}' is not supported by this server.")
    params: dict[str, Any] = {
        "max_new_tokens": body.get("max_completion_tokens") or body.get("max_tokens"),
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "stop": body.get("stop"),
        "sampling_seed": body.get("seed"),
    }
    return {
        "rid": body.get("rid"), "stream": body.get("stream"), "sampling_params": params,
        "input_ids": rendered(body, template),
    }  # fmt: skip


def completion(
    answer: dict[str, Any], input_ids: list[int], body: dict[str, Any]
) -> dict[str, Any]:
    """A `/generate` answer in the shape of a chat completion."""
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": answer["text"]},
        "finish_reason": finish["type"],
        "matched_stop": finish.get("matched"),
    }
    if body.get("return_token_ids"):
        choice |= {"prompt_token_ids": input_ids, "response_token_ids": answer["output_ids"]}
    n_prompt, n_new = meta["prompt_tokens"], meta["completion_tokens"]
    return {
        "id": meta["id"], "object": "chat.completion", "created": int(time.time()),
        "model": str(body.get("model") or "default"), "choices": [choice],
        "usage": {
            "prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new
        },
    }  # fmt: skip


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise(message: str) -> None:
    raise TemplateError(message)
