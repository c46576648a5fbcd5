"""Tool schemas and recorded tool calls, brought to the form that chat templates read."""

from __future__ import annotations

from typing import Any

import orjson

from datagen.prompts.reader import Fault

JSON_TYPES = {
    "dict": "object", "float": "number", "tuple": "array", "list": "array", "int": "integer",
    "str": "string", "bool": "boolean", "String": "string", "Boolean": "boolean",
}  # fmt: skip


def normalise_tools(value: Any) -> list[dict[str, Any]] | Fault | None:
    """OpenAI function objects of a row's tools: a list, or JSON text of one. None when there are none.

    Bare functions are wrapped; type names of Python (dict, float, tuple) become JSON schema's.
    """
    if isinstance(value, str):
        try:
            value = orjson.loads(value) if value.strip() else None
        except orjson.JSONDecodeError as e:
            return Fault("bad_tools", str(e))
    if not value:
        return None
    if not isinstance(value, list):
        return Fault("bad_tools", f"{type(value).__name__} instead of a list")
    tools: list[dict[str, Any]] = []
    for i, entry in enumerate(value):
        inner = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return Fault("bad_tools", f"tool {i} has no name")
        function = {k: v for k, v in inner.items() if v is not None}
        if isinstance(function.get("parameters"), dict):
            function["parameters"] = _json_schema(function["parameters"])
        tools.append({"type": "function", "function": function})
    return tools


def normalise_calls(value: Any, index: int) -> list[dict[str, Any]] | Fault:
    """Tool calls of message `index`: arguments as JSON text, kept to the byte where they were text."""
    if not isinstance(value, list):
        return Fault("bad_tool_calls", f"message {index}")
    calls: list[dict[str, Any]] = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return Fault("bad_tool_calls", f"message {index}")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            try:
                arguments = orjson.dumps(arguments).decode()
            except TypeError as e:
                return Fault("bad_tool_arguments", f"message {index}: {e}")
        if not isinstance(arguments, str) or not _is_json_object(arguments):
            return Fault("bad_tool_arguments", f"message {index}")
        kept: dict[str, Any] = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        kept["type"] = "function"
        kept["function"] = {"name": function["name"], "arguments": arguments}
        calls.append(kept)
    return calls


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _json_schema(node: Any) -> Any:
    """The schema with Python's type names replaced; a property that is called `type` is none."""
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if value is None:
            continue  # Arrow fills the keys that other rows' schemas have with nulls
        if key == "type" and isinstance(value, str):
            if value == "any":
                continue
            plain[key] = JSON_TYPES.get(value, value)
        elif key == "properties" and isinstance(value, dict):
            plain[key] = {k: _json_schema(v) for k, v in value.items() if v is not None}
        elif key in ("enum", "default", "const", "examples"):
            plain[key] = value
        else:
            plain[key] = _json_schema(value)
    return plain
