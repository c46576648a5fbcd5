"""For tests alone: an embedded target that is wrong in one known way, by $DATAGEN_EMBEDDED_FAULT.

Each fault is what a real server has been seen to do, or a mistake that a person makes in starting one.
Preflight, which must find them, never reads the variable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from datagen.capture.writer import RowFormat
from datagen.embedded.api import Server
from datagen.embedded.cache import SequenceCache
from datagen.embedded.capture import LIMITS, SpoolWriter
from datagen.embedded.engine import Engine
from datagen.embedded.job import Job
from datagen.embedded.model import Llama, Prefilled
from datagen.embedded.requests import Request
from datagen.errors import ConfigError

VARIABLE = "DATAGEN_EMBEDDED_FAULT"
FAULTS = (
    "final_only", "shifted_rows", "wrong_norm", "boundary_shift", "radix_hidden_rows",
    "chunk_lost_rows", "other_model", "speculative", "plugin_missing", "plugin_other_version",
    "spool_elsewhere", "disk_full", "thinking_ignored", "tokenize_differs",
)  # fmt: skip
VARIANTS = ("tools_as_typescript", "tokenize_fails")
"""Right, but otherwise than a client would guess."""
STANDS_STILL = "stands_still:"
"""Right while preflight looks and for so many captures, and then no row is answered: `stands_still:15`."""


class Parts:
    """The classes that a server is built of, one of them replaced by a wrong one."""

    def __init__(self, fault: str) -> None:
        """`fault`: one of FAULTS or VARIANTS, STANDS_STILL and a number, or empty. Raises ConfigError."""
        known = (*FAULTS, *VARIANTS, STANDS_STILL)
        still = fault.startswith(STANDS_STILL) and fault.removeprefix(STANDS_STILL).isdecimal()
        if fault and fault not in known[:-1] and not still:
            raise ConfigError(f"unknown fault '{fault}'", where=VARIABLE, fix=", ".join(known))
        self.fault = fault
        models = {"wrong_norm": BeforeNorm, "boundary_shift": OneLayerOn}
        spools = {
            "final_only": FinalOnly, "shifted_rows": Shifted, "plugin_other_version": OtherVersion,
            "spool_elsewhere": Elsewhere, "radix_hidden_rows": PrefixHidden,
        }  # fmt: skip
        servers = {
            "plugin_missing": WithoutPlugin, "thinking_ignored": AlwaysThinking,
            "tools_as_typescript": InTypescript, "tokenize_differs": OtherTokenize,
            "tokenize_fails": NoTokenize,
        }  # fmt: skip
        self.model: type[Llama] = models.get(fault, Llama)
        self.spool: type[SpoolWriter] = spools.get(fault, SpoolWriter)
        self.engine: type[Engine] = LastChunkOnly if fault == "chunk_lost_rows" else Engine
        self.server: Callable[..., Server] = servers.get(fault, Server)
        if still:
            self.server = partial(StandsStill, int(fault.removeprefix(STANDS_STILL)))
        self.limits = replace(LIMITS, min_free_bytes=1 << 62) if fault == "disk_full" else LIMITS

    def said(self, info: dict[str, Any]) -> dict[str, Any]:
        """What the server says of itself."""
        if self.fault == "other_model":
            other = {"model_path": "/models/Other-7B", "served_model_name": "Other-7B"}
            return {k: other.get(k, v) for k, v in info.items()}
        if self.fault == "speculative" and "speculative_algorithm" in info:
            return {**info, "speculative_algorithm": "EAGLE"}
        return info


class BeforeNorm(Llama):
    """Captures the stream before the final norm."""

    def final_of_rows(self, stream_NH: Tensor, final_NH: Tensor) -> Tensor:  # noqa: ARG002
        """The stream itself."""
        return stream_NH


class OneLayerOn(Llama):
    """Captures the outputs of the wanted layers, not their inputs."""

    def prefill(
        self,
        pieces: Sequence[Sequence[int]],
        *,
        caches: Sequence[SequenceCache | None] | None = None,
        boundaries: Sequence[int] | None = None,
    ) -> Prefilled:
        """As Llama, one layer further on."""
        moved = None if boundaries is None else [b + 1 for b in boundaries]
        return super().prefill(pieces, caches=caches, boundaries=moved)


class FinalOnly(SpoolWriter):
    """EAGLE where EAGLE3 was meant: the final state alone."""

    def publish(self, rid: str, input_ids: list[int], rows_TW: Tensor) -> dict[str, Any]:
        """The last columns."""
        whole = self._format
        self._format = RowFormat((), whole.hidden, whole.final_norm, whole.dtype, whole.server)
        try:
            return super().publish(rid, input_ids, rows_TW[:, -whole.hidden :])
        finally:
            self._format = whole


class Shifted(SpoolWriter):
    """Rows of the token before."""

    def publish(self, rid: str, input_ids: list[int], rows_TW: Tensor) -> dict[str, Any]:
        """Row t + 1 holds what row t should."""
        return super().publish(rid, input_ids, torch.roll(rows_TW, 1, 0))


class OtherVersion(SpoolWriter):
    """A plugin that speaks another protocol."""

    def publish(self, rid: str, input_ids: list[int], rows_TW: Tensor) -> dict[str, Any]:
        """As it is, under another number."""
        return {**super().publish(rid, input_ids, rows_TW), "protocol": 99}


class Elsewhere(SpoolWriter):
    """The files of a server on another host."""

    def publish(self, rid: str, input_ids: list[int], rows_TW: Tensor) -> dict[str, Any]:
        """A path that means nothing here."""
        note = super().publish(rid, input_ids, rows_TW)
        return {**note, "path": f"/another-host/spool/{note['path'].rsplit('/', 1)[-1]}"}


class PrefixHidden(SpoolWriter):
    """A prefix cache that heeds no extra_key: tokens seen before have no rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: set[tuple[int, ...]] = set()

    def publish(self, rid: str, input_ids: list[int], rows_TW: Tensor) -> dict[str, Any]:
        """The rows after the longest prompt that was captured before; one at least."""
        ids = tuple(input_ids)
        hits = [len(s) for s in self._seen if ids[: len(s)] == s]
        hidden = min(max(hits, default=0), len(ids) - 1)
        self._seen.add(ids)
        return super().publish(rid, input_ids[hidden:], rows_TW[hidden:])


class LastChunkOnly(Engine):
    """Stock chunked prefill: rows of the last piece alone."""

    def _publish(self, job: Job) -> None:
        request, rows = job.request, job.rows[-1]
        if len(job.rows) > 1 and self.spool is not None:
            last = request.input_ids[-len(rows) :]
            request.capture_note = self.spool.publish(request.rid, last, rows)
        else:
            super()._publish(job)


class WithoutPlugin(Server):
    """A stock server: states as JSON, whatever the request opts in to."""

    async def _run(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            request.states_in_answer = request.capture
        return await super()._run(requests)


class AlwaysThinking(Server):
    """A server whose template never hears of the switch."""

    def _chat_request(self, body: Any) -> dict[str, Any]:
        return super()._chat_request(_without(body, "chat_template_kwargs"))

    def _tokenized(self, body: Any) -> dict[str, Any]:
        return super()._tokenized(_without(body, "chat_template_kwargs"))


class StandsStill(Server):
    """A scheduler that hangs: /health is fine, and rows are taken and not answered."""

    def __init__(self, captures: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._captures_left = captures

    async def _run(self, requests: list[Request]) -> list[Request]:
        if not requests[0].rid.startswith("preflight"):
            if not self._captures_left:
                await asyncio.Event().wait()
            self._captures_left -= requests[0].capture
        return await super()._run(requests)


class InTypescript(Server):
    """Kimi-K2.5's way: code beside the template declares tools as types, which the template takes."""

    def _chat_request(self, body: Any) -> dict[str, Any]:
        return super()._chat_request(_declared(body))

    def _tokenized(self, body: Any) -> dict[str, Any]:
        return super()._tokenized(_declared(body))


class OtherTokenize(InTypescript):
    """Its tokenize route is not the rendering of its chats."""

    def _tokenized(self, body: Any) -> dict[str, Any]:
        return Server._tokenized(self, body)


class NoTokenize(InTypescript):
    """SGLang before 0.5.19 over a tokenizer that names no length: an answer which no JSON can hold."""

    def _tokenized(self, body: Any) -> dict[str, Any]:  # noqa: ARG002
        raise TypeError("Integer exceeds 64-bit range")


def _without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != name}


def _declared(body: dict[str, Any]) -> dict[str, Any]:
    """The body, with its tools as TypeScript in `tools_ts_str`."""
    if not body.get("tools"):
        return body
    lines = ["namespace functions {"]
    for function in (tool["function"] for tool in body["tools"]):
        fields = function.get("parameters", {}).get("properties", {})
        inner = "".join(
            f"  // {field.get('description', '')}\n  {name}: {field.get('type', 'any')},\n"
            for name, field in sorted(fields.items())
        )
        lines.append(f"// {function.get('description', '')}")
        lines.append(f"type {function['name']} = (_: {{\n{inner}}}) => any;")
    extra = {**(body.get("chat_template_kwargs") or {}), "tools_ts_str": "\n".join([*lines, "}"])}
    return {**body, "chat_template_kwargs": extra}
