"""SGLang's native HTTP API, as far as this project uses it: `/generate` with token ids, and control calls.

Facts relied on (SGLang 0.5.17 to 0.5.23): `output_ids` are the exact ids, the stop token included;
`max_new_tokens: 0` returns no hidden states, so a capture asks for 1; an `extra_key` of its own keeps
the radix cache from hiding rows; `finish_reason.type` is `stop`, `length` or `abort`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from datagen.errors import EndpointDown
from datagen.target.failures import CapacityFailure, EndpointFailure, RowFailure
from datagen.target.profile import Sampling

READ_BUFFER_BYTES = 1 << 20  # aiohttp's 64 KiB costs an order of magnitude on megabyte bodies


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `control`: a control call; `row`: one generation or capture, as a whole."""

    connect: float = 5.0
    control: float = 30.0
    row: float = 1800.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `output_ids` are the engine's, the stop token included when one ended it."""

    output_ids: list[int]
    text: str
    finish_reason: str
    matched: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    spec_verify_ct: int | None
    top_logprobs: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Capture:
    """Where the engine leaves the hidden states of one prefill, and what it says they are."""

    path: Path
    n_tokens: int
    width: int
    n_bytes: int
    boundaries: tuple[int, ...]
    final_norm: str
    server: str
    next_token: int
    protocol: int = 0
    """The version of request, answer and file that the plugin speaks; see capture/spool.py."""
    self_test: str = ""
    """What the plugin proved about its boundaries inside the engine; begins with passed, pending, none."""


class SGLangClient:
    """One server. Use as an async context manager; one session, no connection limit of its own."""

    def __init__(
        self, url: str, *, timeouts: Timeouts | None = None, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.timeouts = timeouts or Timeouts()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> SGLangClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers=self._headers,
            read_bufsize=READ_BUFFER_BYTES,
            json_serialize=lambda body: orjson.dumps(body).decode(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # -- control plane -------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """True when the server answers 200 on /health now; proves nothing about progress."""
        try:
            await self._control("GET", "/health")
        except (EndpointFailure, CapacityFailure, RowFailure):
            return False
        return True

    async def server_info(self, *, patience_s: float = 20.0) -> dict[str, Any]:
        """`/server_info`, waiting up to `patience_s` for a server that is starting.

        Raises EndpointDown.
        """
        return await self._patient("/server_info", patience_s)

    async def model_info(self, *, patience_s: float = 20.0) -> dict[str, Any]:
        """`/model_info`; raises EndpointDown."""
        return await self._patient("/model_info", patience_s)

    async def abort(self, rid: str) -> None:
        """Ask the server to drop a request that nobody waits for; a dead server is no error."""
        try:
            await self._control("POST", "/abort_request", {"rid": rid})
        except (EndpointFailure, CapacityFailure, RowFailure):
            return

    async def _patient(self, path: str, patience_s: float) -> dict[str, Any]:
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type((EndpointFailure, CapacityFailure)),
                stop=stop_after_delay(patience_s),
                wait=wait_random_exponential(multiplier=0.2, max=2),
                reraise=True,
            ):
                with attempt:
                    answer = await self._control("GET", path)
        except (EndpointFailure, CapacityFailure, RowFailure) as e:
            raise EndpointDown(
                f"no SGLang server answers {path} ({e})",
                where=self.url,
                fix="start it (`make up` for the embedded target), or correct --endpoints",
            ) from e
        if not isinstance(answer, dict):
            raise EndpointDown(
                f"{path} answers no JSON object", where=self.url, fix="is this an SGLang server?"
            )
        return answer

    async def _control(self, method: str, path: str, body: Any = None) -> Any:
        async with asyncio.timeout(self.timeouts.control):
            return await self._request(method, path, body)

    # -- rows ----------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        rid: str,
        sampling: Sampling,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Answer `input_ids`. Raises RowFailure, CapacityFailure, EndpointFailure."""
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(stop_token_ids),
        }
        if seed is not None and sampling.temperature > 0:
            params["sampling_seed"] = seed
        body = {"rid": rid, "input_ids": list(input_ids), "sampling_params": params}
        answer = await self._row(body, rid)
        meta = answer["meta_info"]
        finish = meta.get("finish_reason") or {}
        kind, matched = str(finish.get("type")), finish.get("matched")
        if kind == "abort":
            raise EndpointFailure("aborted", str(finish.get("message", "")))
        output_ids = [int(i) for i in answer["output_ids"]]
        if kind == "stop" and isinstance(matched, int) and output_ids[-1:] != [matched]:
            output_ids.append(matched)  # some versions trim it; the drafter must learn to stop
        return Generation(
            output_ids=output_ids,
            text=str(answer.get("text", "")),
            finish_reason=kind,
            matched=None if matched is None else str(matched),
            prompt_tokens=int(meta["prompt_tokens"]),
            completion_tokens=int(meta["completion_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            num_retractions=int(meta.get("num_retractions") or 0),
            spec_verify_ct=None if "spec_verify_ct" not in meta else int(meta["spec_verify_ct"]),
        )

    async def capture(self, input_ids: Sequence[int], *, rid: str) -> Capture:
        """Prefill `input_ids` and have the hidden states of every token written to the spool.

        `rid` must be new for every attempt. Raises RowFailure, CapacityFailure, EndpointFailure.
        """
        body = {
            "rid": rid,
            "extra_key": rid,
            "input_ids": list(input_ids),
            "return_hidden_states": True,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": 1,
                "custom_params": {"datagen": True},
            },
        }
        answer = await self._row(body, rid)
        notes = answer["meta_info"].get("datagen")
        if not isinstance(notes, list) or not notes or not isinstance(notes[0], Mapping):
            raise RowFailure(
                "capture_not_live",
                "the answer holds no meta_info.datagen: the capture plugin is not loaded",
                permanent=True,
            )
        note = notes[0]
        if "error" in note:
            raise RowFailure("capture_failed", str(note["error"]))
        try:
            return Capture(
                path=Path(str(note["path"])),
                n_tokens=int(note["rows"]),
                width=int(note["width"]),
                n_bytes=int(note["bytes"]),
                boundaries=tuple(int(b) for b in note["boundaries"]),
                final_norm=str(note["final_norm"]),
                server=str(note["server"]),
                next_token=int(answer["output_ids"][0]),
                protocol=int(note.get("protocol") or 0),
                self_test=str(note.get("self_test") or ""),
            )
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise RowFailure("capture_malformed", f"{type(e).__name__}: {e}") from e

    async def capture_states(self, input_ids: Sequence[int], *, rid: str) -> NDArray[np.float32]:
        """Prefill `input_ids` and have the hidden states in the answer: float32 [rows, width].

        As many rows as the server kept, which is to be checked. Raises as `capture`.
        """
        body = {
            "rid": rid,
            "extra_key": rid,
            "input_ids": list(input_ids),
            "return_hidden_states": True,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        }
        answer = await self._row(body, rid)
        try:
            states_TW = np.asarray(answer["meta_info"]["hidden_states"][0], dtype=np.float32)
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise RowFailure("capture_malformed", f"hidden_states: {type(e).__name__}: {e}") from e
        if states_TW.ndim != 2:
            raise RowFailure("capture_malformed", f"hidden_states of shape {states_TW.shape}")
        return states_TW

    async def native(self, body: dict[str, Any], *, rid: str) -> dict[str, Any]:
        """One `/generate` call with fields of one's own; the answer as it came. Raises as `generate`."""
        return await self._row({"rid": rid, **body}, rid)

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """One `/v1/chat/completions` call; the answer as it came. Raises as `generate`."""
        async with asyncio.timeout(self.timeouts.row):
            answer = await self._request("POST", "/v1/chat/completions", body)
        if not isinstance(answer, dict):
            raise RowFailure("malformed_answer", repr(answer)[:200])
        return answer

    async def _row(self, body: dict[str, Any], rid: str) -> dict[str, Any]:
        """POST one row; a request that is given up, for whatever cause, is aborted on the server."""
        try:
            async with asyncio.timeout(self.timeouts.row):
                answer = await self._request("POST", "/generate", body)
        except TimeoutError as e:
            await self.abort(rid)
            raise EndpointFailure("row_timeout", f"no answer in {self.timeouts.row:.0f} s") from e
        except asyncio.CancelledError:
            await asyncio.shield(self.abort(rid))
            raise
        if isinstance(answer, dict) and "meta_info" in answer and "output_ids" in answer:
            return answer
        raise RowFailure("malformed_answer", orjson.dumps(answer)[:200].decode(errors="replace"))

    async def _request(self, method: str, path: str, body: Any) -> Any:
        assert self._session is not None, "use SGLangClient as an async context manager"
        sent = False
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                sent = True
                payload = await response.read()
                status = response.status
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            raise EndpointFailure("unreachable", str(e), in_flight=False) from e
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            if isinstance(e, TimeoutError) and not isinstance(e, aiohttp.ClientError):
                raise
            raise EndpointFailure("connection_lost", f"{type(e).__name__}: {e} sent={sent}") from e
        if status == 200:
            if not payload or path == "/health" or path == "/abort_request":
                return None
            try:
                return orjson.loads(payload)
            except orjson.JSONDecodeError as e:
                raise RowFailure("bad_json", f"{e}: {payload[:120]!r}") from e
        detail = _message(payload)
        if status in (429, 503):
            raise CapacityFailure(f"http_{status}", detail)
        if 400 <= status < 500:
            reason = (
                "over_context"
                if "longer than the model's context length" in detail
                else f"http_{status}"
            )
            raise RowFailure(reason, detail, permanent=True)
        raise EndpointFailure(f"http_{status}", detail)


def _message(payload: bytes) -> str:
    """The error text of a body: SGLang's {"error": {"message"}}, or its beginning as it is."""
    try:
        body = orjson.loads(payload)
        error = body["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return payload[:200].decode(errors="replace").strip()
