"""The embedded target's routes: SGLang's paths, fields and errors, as far as this project uses them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from datagen.embedded.chat import ChatTemplate, completion, native_body, tokenized
from datagen.embedded.engine import Engine
from datagen.embedded.requests import BadRequest, Request, parse_generate
from datagen.embedded.sampling import SamplingParams

MAX_BODY_BYTES = 256 << 20
HEALTH_TIMEOUT_S = 20.0


class Server:
    """Routes and bookkeeping around one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        info: dict[str, Any],
        model_info: dict[str, Any],
        template: ChatTemplate | None = None,
    ) -> None:
        self._engine, self._info, self._model_info = engine, info, model_info
        self._template = template
        self._in_flight: dict[str, asyncio.Future[Request]] = {}

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_sglang])
        for path in ("/health", "/ready"):
            app.router.add_get(path, self.health)
        app.router.add_get("/health_generate", self.health_generate)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        app.router.add_get("/metrics", self.metrics)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self.model_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/tokenize", self.tokenize)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_route("*", "/flush_cache", self.flush_cache)
        return app

    async def health(self, _: web.Request) -> web.Response:
        """200 while the engine lives (the process ends with it)."""
        return web.Response()

    async def health_generate(self, _: web.Request) -> web.Response:
        """200 when one token could be generated in time, else 503."""
        probe = SamplingParams(temperature=0.0, max_new_tokens=1)
        rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
        asked = Request(rid, [0], probe, False, False, time.monotonic())
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._run([asked])
        except TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def server_info(self, _: web.Request) -> web.Response:
        """Flat arguments, as SGLang gives them, and the load."""
        running, queued = self._engine.load
        state: dict[str, Any] = {"num_running_reqs": running, "num_queue_reqs": queued}
        if (mean := self._engine.mean_accept_length) is not None:
            state["avg_spec_accept_length"] = mean
        return _json({**self._info, "internal_states": [state]})

    async def metrics(self, _: web.Request) -> web.Response:
        """SGLang's gauges and counters, as far as the dispatcher reads them."""
        running, queued = self._engine.load
        values = {
            "num_running_reqs": running,
            "num_queue_reqs": queued,
            "token_usage": self._engine.token_usage,
            "prompt_tokens_total": self._engine.prompt_tokens,
            "generation_tokens_total": self._engine.generated_tokens,
        }
        label = f'{{model_name="{self._info["served_model_name"]}"}}'
        lines = [f"sglang:{name}{label} {value}\n" for name, value in values.items()]
        return web.Response(text="".join(lines))

    async def model_info(self, _: web.Request) -> web.Response:
        """What is served."""
        return _json(self._model_info)

    async def flush_cache(self, _: web.Request) -> web.Response:
        """There is no prefix cache to flush."""
        return web.Response(text="Cache flushed.\n")

    async def abort(self, request: web.Request) -> web.Response:
        """Abort one request, or all; an unknown rid is fine."""
        body = await _body(request)
        if not isinstance(body, dict):
            raise BadRequest("The request body must be a JSON object.")
        if body.get("abort_all"):
            self._engine.abort("")
        elif rid := str(body.get("rid") or ""):
            for known in list(self._in_flight):
                if known == rid or known.startswith(f"{rid}_"):
                    self._engine.abort(known)
        return web.Response()

    async def generate(self, http: web.Request) -> web.Response:
        """Answer one request or a batch; a client that goes away aborts its requests."""
        requests, batch = self._parsed(await _body(http))
        done = await self._run(requests)
        answers = [self._answer(r) for r in done]
        return _json(answers if batch else answers[0])

    async def chat(self, http: web.Request) -> web.Response:
        """Answer one conversation, rendered by the checkpoint's own template."""
        body = await _body(http)
        asked = self._chat_request(body)
        requests, _ = self._parsed(asked)
        (done,) = await self._run(requests)
        return _json(completion(self._answer(done), asked["input_ids"], body))

    async def tokenize(self, http: web.Request) -> web.Response:
        """The ids of a conversation, as `chat` renders it, without a forward pass."""
        return _json(self._tokenized(await _body(http)))

    def _tokenized(self, body: Any) -> dict[str, Any]:
        return tokenized(body, self._known_template(), self._engine.context_length)

    def _chat_request(self, body: Any) -> dict[str, Any]:
        return native_body(body, self._known_template())

    def _known_template(self) -> ChatTemplate:
        if self._template is None:
            raise BadRequest("This server has no chat template.")
        return self._template

    def _parsed(self, body: Any) -> tuple[list[Request], bool]:
        return parse_generate(
            body,
            encode=lambda text: self._engine.tokenizer.encode(text).ids,
            context_length=self._engine.context_length,
            vocab_size=self._engine.model.config.vocab_size,
            can_capture=self._engine.spool is not None,
            now=time.monotonic(),
        )

    async def _run(self, requests: list[Request]) -> list[Request]:
        """Have the engine finish them; gives them up when cancelled. Raises BadRequest."""
        for request in requests:
            if request.rid in self._in_flight:
                raise BadRequest(f"Duplicate request ID detected: {request.rid}")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Request]] = [loop.create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._in_flight[request.rid] = future
            self._engine.submit(request, partial(_hand_over, loop, future))
        try:
            return list(await asyncio.gather(*futures))
        except asyncio.CancelledError:
            for request in requests:
                self._engine.abort(request.rid)
            raise
        finally:
            for request in requests:
                self._in_flight.pop(request.rid, None)

    def _answer(self, request: Request) -> dict[str, Any]:
        assert request.finish is not None
        ids = request.output_ids
        matched = request.finish.get("matched")
        shown = ids[:-1] if isinstance(matched, int) and not request.params.no_stop_trim else ids
        text = self._engine.tokenizer.decode(
            shown, skip_special_tokens=request.params.skip_special_tokens
        )
        if isinstance(matched, str) and not request.params.no_stop_trim:
            text = text.partition(matched)[0]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": self._model_info["weight_version"],
            "e2e_latency": time.monotonic() - request.arrived,
        }
        if request.top_logprobs is not None and request.spec is None:
            pairs = list(zip(ids, request.output_logprobs, strict=True))
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[chosen, i, None] for i, (chosen, _) in pairs]
            if request.top_logprobs:
                meta["input_top_logprobs"] = []
                meta["output_top_logprobs"] = [[[p, i, None] for p, i in t] for _, (_, t) in pairs]
        if request.spec is not None:
            meta |= request.spec.meta_info(len(ids))
            if request.return_steps:
                meta["datagen_spec_steps"] = request.spec.steps
        if request.capture_note is not None:
            meta |= {"datagen": [request.capture_note], "hidden_states": []}
        if request.states is not None:
            meta["hidden_states"] = [request.states]
        answer: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
        if request.return_prompt_token_ids:
            answer["prompt_token_ids"] = request.input_ids
        return answer


def _hand_over(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Request], request: Request
) -> None:
    loop.call_soon_threadsafe(_resolve, future, request)


def _resolve(future: asyncio.Future[Request], request: Request) -> None:
    if not future.done():
        future.set_result(request)


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


async def _body(request: web.Request) -> Any:
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as e:
        raise BadRequest(f"The body is no JSON: {e}") from e


@web.middleware
async def _errors_as_sglang(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except BadRequest as e:
        body = orjson.dumps({"error": {"message": str(e)}})
        return web.Response(status=400, body=body, content_type="application/json")
    return response
