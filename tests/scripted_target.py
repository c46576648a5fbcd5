"""A target without a model: SGLang's answers and real spool files, as fast as a socket gives them.

For what is about the collector alone: its memory, its CPU, a full disk. Run as a module:
    python -m tests.scripted_target PORT SPOOL_DIR [SPOIL]
SPOIL: some captures hold NaN. `some`: those of every fifth sample; `first`: the first of every
sample; `all`.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from datagen.capture.spool import PROTOCOL, spool_path, write_spool
from tests.tiny import BOUNDARIES, CONTEXT, HIDDEN

WIDTH = (len(BOUNDARIES) + 1) * HIDDEN


def answer_ids(input_ids: list[int]) -> list[int]:
    """Ten tokens that depend on the question, and the stop token."""
    seed = int.from_bytes(hashlib.sha256(repr(input_ids).encode()).digest()[:4], "big")
    return [*np.random.default_rng(seed).integers(3, 500, 10).tolist(), 2]


def app(spool: Path, spoil: str = "") -> web.Application:
    """The routes that the collector uses."""
    spool.mkdir(parents=True, exist_ok=True)
    captured: set[bytes] = set()

    def spoilt(rid: str, ids: list[int]) -> bool:
        key = hashlib.sha256(repr(ids).encode()).digest()
        first = key not in captured
        captured.add(key)
        if rid.startswith("preflight"):
            return False
        return {"some": key[0] % 5 == 0, "first": first, "all": True}.get(spoil, False)

    async def generate(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        ids, rid = body["input_ids"], body["rid"]
        meta: dict[str, Any] = {"id": rid, "prompt_tokens": len(ids), "cached_tokens": 0}
        if body.get("return_hidden_states"):
            path = spool_path(spool, rid)
            rows = np.random.default_rng(len(ids)).integers(
                0x3C00, 0x4100, (len(ids), WIDTH), dtype=np.uint16
            )
            if spoilt(rid, ids):
                rows[len(ids) // 2, HIDDEN] = 0x7FC0
            size = write_spool(
                path,
                rows=[rows.data],
                n_tokens=len(ids),
                width=WIDTH,
                dtype="BF16",
                input_ids=struct.pack(f"<{len(ids)}i", *ids),
                metadata={
                    "rid": rid, "boundaries": ",".join(map(str, BOUNDARIES)),
                    "hidden": str(HIDDEN), "final_norm": "post", "server": "scripted 1",
                },
            )  # fmt: skip
            meta["datagen"] = [
                {
                    "path": str(path), "rows": len(ids), "width": WIDTH, "bytes": size,
                    "boundaries": list(BOUNDARIES), "final_norm": "post", "server": "scripted 1",
                    "protocol": PROTOCOL,
                }
            ]  # fmt: skip
            out, finish = [5], {"type": "length", "length": 1}
        else:
            out, finish = answer_ids(ids), {"type": "stop", "matched": 2}
        meta |= {"completion_tokens": len(out), "finish_reason": finish}
        return web.json_response({"text": "an answer", "output_ids": out, "meta_info": meta})

    async def info(_: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23", "model_path": "tiny-llama", "dtype": "bfloat16",
                "context_length": CONTEXT, "max_running_requests": 64,
            }
        )  # fmt: skip

    async def ok(_: web.Request) -> web.Response:
        return web.Response()

    routes = web.Application(client_max_size=1 << 26)
    routes.router.add_post("/generate", generate)
    routes.router.add_post("/abort_request", ok)
    routes.router.add_get("/health", ok)
    for path in ("/server_info", "/model_info"):
        routes.router.add_get(path, info)
    return routes


async def main(port: int, spool: Path, spoil: str) -> None:
    """Serve until the process is ended."""
    runner = web.AppRunner(app(spool, spoil), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("serving", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def scripted(spool: Path, spoil: str = "") -> AsyncIterator[str]:
    """One in this process's loop; yields its address."""
    runner = web.AppRunner(app(spool, spoil), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:4])))
