"""SGLang's native HTTP API, as far as this project uses it: `/generate` with token ids, and control calls.

Facts relied on (SGLang 0.5.17 to 0.5.23): `output_ids` are the exact ids, the stop token included;
`max_new_tokens: 0` returns no hidden states, so a capture asks for 1; an `extra_key` of its own keeps
the radix cache from hiding rows; `finish_reason.type` is `stop`, `length` or `abort`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)
from yarl import URL

from datagen.errors import EndpointDown
from datagen.target.answers import Capture as Capture
from datagen.target.answers import Generation as Generation
from datagen.target.answers import capture_of, failure_of, generation_of, message_of
from datagen.target.chat import Chats
from datagen.target.deadlines import Deadlines
from datagen.target.failures import CapacityFailure, EndpointFailure, RequestFailure, RowFailure
from datagen.target.load import ServerLoad, load_from_info, load_from_metrics
from datagen.target.profile import Sampling
from datagen.target.tokens import Message

ABORT_GRACE_S = 2.0
KEEPALIVE_S = 4.0  # below the 5 s after which SGLang's server closes an idle connection
DUPLICATE = "Duplicate request ID"
CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)
"""How a server's end of an idle connection shows: in the first read, or already in the write."""
IDLE_CLOSE_S = 1.0  # after which a row is not sent again unasked; no engine is replaced in less
READ_BUFFER_BYTES = 1 << 20  # aiohttp's 64 KiB costs an order of magnitude on megabyte bodies


API_KEY = "DATAGEN_API_KEY"
"""In the environment: a secret belongs neither in a form nor in a run's settings."""
UNAUTHORISED = ("http_401", "http_403")


def _may_pass(e: BaseException) -> bool:
    """Whether a control call may do better when it is made again."""
    return isinstance(e, (EndpointFailure, CapacityFailure)) and e.reason not in UNAUTHORISED


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `control`: a control call; `row`: one generation or capture, as a whole."""

    connect: float = 5.0
    control: float = 30.0
    row: float = 1800.0


class SGLangClient:
    """One server. Use as an async context manager; one session, no connection limit of its own.

    `api_key`: None takes $DATAGEN_API_KEY.
    """

    def __init__(
        self, url: str, *, timeouts: Timeouts | None = None, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.timeouts = timeouts or Timeouts()
        key = api_key or os.environ.get(API_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._routes: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._anew: aiohttp.ClientSession | None = None
        """Takes a new connection for every request."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._has_metrics = True
        self._deadlines = Deadlines()
        self.chats = Chats(self._ask, control_s=self.timeouts.control, row_s=self.timeouts.row)

    async def __aenter__(self) -> SGLangClient:
        self._session = self._connected(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        )
        self._anew = self._connected(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    def _connected(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BUFFER_BYTES,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect),
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_GRACE_S)
        for session in (self._session, self._anew):
            if session is not None:
                await session.close()

    # -- control plane -------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """True when the server answers 200 on /health now; proves nothing about progress."""
        try:
            await self._control("GET", "/health")
        except (RequestFailure, TimeoutError):
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
        except (RequestFailure, TimeoutError):
            return

    async def load(self) -> ServerLoad | None:
        """What the server says of its queue, or None when it says nothing. Raises RequestFailure."""
        if self._has_metrics:
            try:
                return load_from_metrics(await self._control("GET", "/metrics"))
            except (RowFailure, EndpointFailure) as e:
                if e.reason != "http_404":
                    raise
                self._has_metrics = False  # SGLang shows them with --enable-metrics only
        info = await self._control("GET", "/server_info")
        return load_from_info(info) if isinstance(info, dict) else None

    def _abandon(self, rid: str) -> None:
        """Abort a request in the background: its row must not wait for a server that may hang."""
        task = asyncio.create_task(self.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _patient(self, path: str, patience_s: float) -> dict[str, Any]:
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception(_may_pass),
                stop=stop_after_delay(patience_s),
                wait=wait_random_exponential(multiplier=0.2, max=2),
                reraise=True,
            ):
                with attempt:
                    answer = await self._control("GET", path)
        except RequestFailure as e:
            if e.reason in UNAUTHORISED:
                raise EndpointDown(
                    f"the server refuses the API key ({e})" if self._headers else
                    f"the server asks for an API key ({e})",
                    where=self.url,
                    fix=f"set {API_KEY} to the one that it was started with (for flows before `make up`)",
                ) from e  # fmt: skip
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
        return generation_of(await self._row(body, rid))

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
        return capture_of(await self._row(body, rid))

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

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> list[int]:
        """As `Chats.render`."""
        return await self.chats.render(messages, tools, kwargs)

    async def _ask(self, path: str, body: Any, within_s: float) -> Any:
        try:
            async with asyncio.timeout(within_s):
                return await self._request("POST", path, body)
        except TimeoutError as e:
            waited = f"no answer of {path} in {within_s:.0f} s"
            raise EndpointFailure("row_timeout", waited) from e

    async def _row(self, body: dict[str, Any], rid: str) -> dict[str, Any]:
        """POST one row; a request that is given up, for whatever cause, is aborted on the server."""
        try:
            with self._deadlines.within(self.timeouts.row):
                answer = await self._request("POST", "/generate", body)
        except TimeoutError as e:
            self._abandon(rid)
            raise EndpointFailure("row_timeout", f"no answer in {self.timeouts.row:.0f} s") from e
        except asyncio.CancelledError:
            self._abandon(rid)
            raise
        if isinstance(answer, dict) and "meta_info" in answer and "output_ids" in answer:
            return answer
        raise RowFailure("malformed_answer", orjson.dumps(answer)[:200].decode(errors="replace"))

    async def _request(self, method: str, path: str, body: Any) -> Any:
        """One exchange; once more, over a new connection, when the server closes an idle one under it."""
        assert self._session is not None, "use SGLangClient as an async context manager"
        assert self._anew is not None
        began = time.monotonic()
        try:
            return await self._exchange(self._session, method, path, body)
        except EndpointFailure as e:
            lost = e.reason == "connection_lost" and isinstance(e.__cause__, CLOSED)
            if not lost or time.monotonic() - began > IDLE_CLOSE_S:
                raise
        try:
            return await self._exchange(self._anew, method, path, body)
        except EndpointFailure as e:
            if e.reason in ("connection_lost", "unreachable"):
                # it was no idle connection: the server died of the first
                raise EndpointFailure("connection_lost", f"twice, then {e}") from e
            raise
        except RowFailure as e:
            if DUPLICATE in str(e):  # the first arrived, and is still at work
                raise EndpointFailure("connection_lost", f"asked twice: {e}") from e
            raise

    async def _exchange(
        self, session: aiohttp.ClientSession, method: str, path: str, body: Any
    ) -> Any:
        data = None
        if body is not None:
            # a copy, for orjson's own bytes keep 16 KB; a ready payload, for aiohttp would seek its kind
            exact = bytes(memoryview(orjson.dumps(body)))
            data = aiohttp.BytesPayload(exact, content_type="application/json")
        url = self._routes.get(path) or self._routes.setdefault(path, URL(self.url + path))
        try:
            async with session.request(method, url, data=data) as response:
                payload = await response.read()
                status, headers = response.status, response.headers
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            raise EndpointFailure("unreachable", str(e), in_flight=False) from e
        except (aiohttp.ClientError, OSError) as e:
            if isinstance(e, TimeoutError) and not isinstance(e, aiohttp.ClientError):
                raise
            raise EndpointFailure("connection_lost", f"{type(e).__name__}: {e}") from e
        if status == 200:
            if path in ("/health", "/abort_request"):
                return None
            if path == "/metrics":
                return payload.decode(errors="replace")
            try:
                return orjson.loads(payload)
            except orjson.JSONDecodeError as e:
                raise RowFailure("bad_json", f"{e}: {payload[:120]!r}") from e
        raise failure_of(status, message_of(payload), headers.get("Retry-After"))
