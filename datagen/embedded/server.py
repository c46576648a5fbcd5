"""`datagen serve`: loads the embedded target and serves it until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import torch
from aiohttp import web
from tokenizers import Tokenizer

from datagen.capture.spool import default_spool
from datagen.embedded.api import Server
from datagen.embedded.chat import ChatTemplate
from datagen.embedded.engine import Engine
from datagen.embedded.faults import VARIABLE, Parts
from datagen.embedded.speculate import Speculator
from datagen.embedded.weights import MODEL_NAME, ensure_checkpoint
from datagen.errors import ConfigError
from datagen.target.profile import load_profile

log = logging.getLogger(__name__)
ENGINE, VERSION = "datagen-embedded", "1"
STOP_TIMEOUT_S = 5.0


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
    drafter: Path | None = None,
    draft_steps: int = 3,
) -> None:
    """Serve until SIGTERM or SIGINT. `target`: smollm2, or a checkpoint directory.

    A directory needs `boundaries` (or $DATAGEN_CAPTURE_BOUNDARIES), Hugging Face indices. `drafter`:
    a checkpoint to speculate with, `draft_steps` tokens a cycle. Raises ConfigError.
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
    parts = Parts(os.environ.get(VARIABLE, ""))
    if parts.fault:
        log.critical("this server is wrong on purpose: %s=%s", VARIABLE, parts.fault)
    model = parts.model.load(directory, dtype)
    if not 0 <= min(boundaries) <= max(boundaries) < model.config.num_layers:
        raise ConfigError(
            f"boundaries {list(boundaries)} lie outside 0..{model.config.num_layers - 1}",
            where=target,
        )
    speculator = (
        Speculator.load(drafter, model, tuple(boundaries), steps=draft_steps) if drafter else None
    )
    spool_dir = spool_dir or Path(os.environ.get("DATAGEN_CAPTURE_DIR") or default_spool(port))
    spool = parts.spool(
        spool_dir,
        boundaries=boundaries,
        hidden=model.config.hidden_size,
        server=f"{ENGINE} {VERSION}",
        limits=parts.limits,
    )
    context = min(context_length or model.config.context_length, model.config.context_length)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    engine = parts.engine(
        model,
        tokenizer,
        max_running=max_running_requests,
        context_length=context,
        spool=spool,
        on_death=_end_process,
        speculator=speculator,
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
        "speculative_algorithm": "EAGLE3" if speculator else None,
        "speculative_draft_model_path": str(drafter) if drafter else None,
        "speculative_num_steps": draft_steps if speculator else None,
        "speculative_eagle_topk": 1 if speculator else None,
        "speculative_num_draft_tokens": draft_steps + 1 if speculator else None,
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
    server = parts.server(
        engine,
        info=parts.said(info),
        model_info=parts.said(model_info),
        template=ChatTemplate.found(directory, tokenizer),
    )
    engine.start()
    try:
        asyncio.run(_listen(engine, server, host, port))
    finally:
        engine.stop()
        spool.close()


async def _listen(engine: Engine, server: Server, host: str, port: int) -> None:
    """Serve until a signal; requests in flight are then answered as aborted, at once."""
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=STOP_TIMEOUT_S
    )
    await runner.setup()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever sees it serve may also end it
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as e:
        await runner.cleanup()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {e.strerror}",
            fix="stop what holds the port, or choose another with --port",
        ) from e
    print(f"serving on http://{host}:{port}", flush=True)
    await ended.wait()
    await asyncio.to_thread(engine.stop)
    await runner.cleanup()


def _end_process(error: BaseException) -> None:
    log.critical("the engine died", exc_info=error)
    os._exit(1)
