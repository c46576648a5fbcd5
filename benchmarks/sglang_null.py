"""An engine that computes nothing: SGLang's capture API over drawn rows, through the plugin's own writer.

It says how fast the collector can be where no engine takes CPUs of it, and lets the collector's part be
measured without a GPU. `Null` is used like `sglang_server.Server`.

    python benchmarks/sglang_null.py PORT SPOOL BOUNDARIES HIDDEN
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from array import array
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from datagen.capture.spool import SpoolError  # noqa: E402
from datagen.capture.writer import Limits, RowFormat, SpoolWriter  # noqa: E402

DRAWN = 1024
"""Rows that are drawn; every capture begins at another of them."""


def rows_like_states(width: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """uint16 [2 * DRAWN, width]: Gaussian bf16 values, every channel with a scale of its own."""
    draw = np.random.default_rng(0)
    scales = np.exp(draw.standard_normal(width)).astype(np.float32)
    values = draw.standard_normal((DRAWN, width), dtype=np.float32) * scales
    return np.tile((values.view(np.uint32) >> 16).astype(np.uint16), (2, 1))


async def serve(port: int, spool: Path, boundaries: tuple[int, ...], hidden: int) -> None:
    """Until the process is ended."""
    from aiohttp import web

    row_format = RowFormat(boundaries, hidden, "post", "BF16", "null 0")
    rows_TW = rows_like_states(row_format.width)
    writer = SpoolWriter(spool, Limits())
    asked = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal asked
        body = await request.json()
        ids, rid = body["input_ids"], body["rid"]
        first = asked = (asked + 61) % DRAWN
        piece = memoryview(rows_TW[first : first + len(ids)]).cast("B")
        try:
            await asyncio.to_thread(writer.hold, piece.nbytes)
            note = writer.publish(rid, [piece], len(ids), array("i", ids).tobytes(), row_format)
        except SpoolError as e:
            writer.release(piece.nbytes)
            note = {"error": str(e)}
        meta = {
            "id": rid, "prompt_tokens": len(ids), "cached_tokens": 0, "completion_tokens": 1,
            "finish_reason": {"type": "length", "length": 1}, "datagen": [note],
        }  # fmt: skip
        return web.json_response({"text": "", "output_ids": [5], "meta_info": meta})

    async def ok(_: web.Request) -> web.Response:
        return web.json_response({"version": "null"})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/generate", generate)
    for path in ("/health", "/server_info", "/model_info"):
        app.router.add_get(path, ok)
    app.router.add_post("/abort_request", ok)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


class Null:
    """The engine as a process of its own."""

    def __init__(self, port: int, spool: str, boundaries: str, hidden: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), spool, boundaries, str(hidden)]
        )

    def wait(self, patience_s: float) -> None:
        """Until it answers; ends this script when it does not."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self.info()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    sys.exit("the null engine did not come up")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(20)

    def info(self) -> dict[str, Any]:
        """What it says of itself."""
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=30) as answer:
            return json.load(answer)  # type: ignore[no-any-return]


if __name__ == "__main__":
    asyncio.run(
        serve(int(sys.argv[1]), Path(sys.argv[2]), tuple(map(int, sys.argv[3].split(","))), int(sys.argv[4]))
    )  # fmt: skip
