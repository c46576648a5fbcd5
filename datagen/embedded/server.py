"""The embedded target over HTTP: SGLang's paths, fields and errors, as far as this project uses them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web
from tokenizers import Tokenizer

from datagen.embedded.capture import SpoolWriter
from datagen.embedded.engine import Engine
from datagen.embedded.model import Llama
from datagen.embedded.requests import BadRequest, Request, parse_generate
from datagen.embedded.weights import MODEL_NAME, ensure_checkpoint
from datagen.errors import ConfigError
from datagen.target.profile import load_profile

log = logging.getLogger(__name__)
ENGINE, VERSION = "datagen-embedded", "1"
MAX_BODY_BYTES = 256 << 20


class Server:
    """Routes and bookkeeping around one engine."""

    def __init__(self, engine: Engine, *, info: dict[str, Any], model_info: dict[str, Any]) -> None:
        self._engine, self._info, self._model_info = engine, info, model_info
        self._in_flight: dict[str, asyncio.Future[Request]] = {}

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_sglang])
        for path in ("/health", "/health_generate", "/ready"):
            app.router.add_get(path, self.health)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self.model_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_route("*", "/flush_cache", self.flush_cache)
        return app

    async def health(self, _: web.Request) -> web.Response:
        """200 while the engine lives (the process ends with it)."""
        return web.Response()

    async def server_info(self, _: web.Request) -> web.Response:
        """Flat arguments, as SGLang gives them, and the load."""
        running, queued = self._engine.load
        state = {"num_running_reqs": running, "num_queue_reqs": queued}
        return _json({**self._info, "internal_states": [state]})

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
        requests, batch = parse_generate(
            await _body(http),
            encode=lambda text: self._engine.tokenizer.encode(text).ids,
            context_length=self._engine.context_length,
            vocab_size=self._engine.model.config.vocab_size,
            can_capture=self._engine.spool is not None,
            now=time.monotonic(),
        )
        for request in requests:
            if request.rid in self._in_flight:
                raise BadRequest(f"Duplicate request ID detected: {request.rid}")
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._in_flight[request.rid] = future
            self._engine.submit(request, partial(_hand_over, loop, future))
        try:
            done = await asyncio.gather(*futures)
        except asyncio.CancelledError:
            for request in requests:
                self._engine.abort(request.rid)
            raise
        finally:
            for request in requests:
                self._in_flight.pop(request.rid, None)
        answers = [self._answer(r) for r in done]
        return _json(answers if batch else answers[0])

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
        if request.capture_note is not None:
            meta |= {"datagen": [request.capture_note], "hidden_states": []}
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


def default_spool(port: int) -> Path:
    """Memory if there is a /dev/shm, else the temporary directory; one per user and port."""
    memory = Path("/dev/shm")
    root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"datagen-spool-{os.getuid()}-{port}"


def serve(
    *,
    target: str = "smollm2",
    host: str = "127.0.0.1",
    port: int = 30000,
    dtype: str = "bfloat16",
    threads: int | None = None,
    spool_dir: Path | None = None,
    boundaries: tuple[int, ...] | None = None,
    max_running_requests: int = 32,
    context_length: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `target`: smollm2, or a checkpoint directory.

    A directory needs `boundaries` (or $DATAGEN_CAPTURE_BOUNDARIES), Hugging Face indices. Raises
    ConfigError.
    """
    if threads:
        torch.set_num_threads(threads)
    given = os.environ.get("DATAGEN_CAPTURE_BOUNDARIES")
    if boundaries is None and given:
        boundaries = tuple(int(b) for b in given.split(","))
    if target == "smollm2":
        directory = ensure_checkpoint(progress=lambda text: print(text, flush=True))
        name, boundaries = MODEL_NAME, boundaries or load_profile(target).boundaries
    else:
        directory = Path(target)
        name = directory.resolve().name
        if boundaries is None:
            raise ConfigError(
                "a checkpoint directory needs boundaries", where=target, fix="set --boundaries"
            )
    model = Llama.load(directory, dtype)
    if not 0 <= min(boundaries) <= max(boundaries) < model.config.num_layers:
        raise ConfigError(
            f"boundaries {list(boundaries)} lie outside 0..{model.config.num_layers - 1}",
            where=target,
        )
    spool_dir = spool_dir or Path(os.environ.get("DATAGEN_CAPTURE_DIR") or default_spool(port))
    spool = SpoolWriter(
        spool_dir,
        boundaries=boundaries,
        hidden=model.config.hidden_size,
        server=f"{ENGINE} {VERSION}",
    )
    context = min(context_length or model.config.context_length, model.config.context_length)
    engine = Engine(
        model,
        Tokenizer.from_file(str(directory / "tokenizer.json")),
        max_running=max_running_requests,
        context_length=context,
        spool=spool,
        on_death=_end_process,
    )
    revision_file = directory / "REVISION"
    revision = revision_file.read_text().strip() if revision_file.exists() else "unstated"
    info = {
        "engine": ENGINE,
        "version": VERSION,
        "model_path": str(directory),
        "tokenizer_path": str(directory),
        "served_model_name": name,
        "revision": revision,
        "dtype": dtype,
        "context_length": context,
        "max_running_requests": max_running_requests,
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
        "return_hidden_states_mode": "full",
        "speculative_algorithm": None,
        "tp_size": 1,
        "dp_size": 1,
        "quantization": None,
        "random_seed": None,
        "capture_dir": str(spool_dir),
        "capture_boundaries": list(boundaries),
    }
    model_info = {
        "model_path": str(directory),
        "tokenizer_path": str(directory),
        "is_generation": True,
        "weight_version": "default",
        "model_type": model.config.model_type,
        "architectures": [model.config.architecture],
    }
    engine.start()
    try:
        asyncio.run(_listen(Server(engine, info=info, model_info=model_info).app(), host, port))
    finally:
        engine.stop()
        spool.close()


async def _listen(app: web.Application, host: str, port: int) -> None:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as e:
        await runner.cleanup()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {e.strerror}",
            fix="stop what holds the port, or choose another with --port",
        ) from e
    print(f"serving on http://{host}:{port}", flush=True)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await asyncio.wait_for(runner.cleanup(), 10)


def _end_process(error: BaseException) -> None:
    log.critical("the engine died", exc_info=error)
    os._exit(1)
