"""What capturing costs a real SGLang server: prefill with and without, side by side in one process.

    python benchmarks/sglang_capture.py --python PY --model DIR --boundaries 2,15,27 [-- server flags]

starts one server with the plugin (of this checkout, put in front of its environment) and alternates
batches of the same prompts: captured, each file verified and unlinked, and plainly prefilled. `--widen`
first writes a random model of Kimi-K2.5's width beside the given one. Needs the standard library, aiohttp,
and torch for --widen; not the rest of this project's environment, so that it runs in SGLang's own.
Example on one Hopper GPU, triton attention:
    ... --boundaries 2,15,27 --concurrency 256 -- --attention-backend triton --sampling-backend pytorch
        --grammar-backend none --mem-fraction-static 0.6 --chunked-prefill-size 8192
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from datagen.capture.spool import discard, read_spool  # noqa: E402

ENTRY_POINTS = "[sglang.srt.plugins]\ndatagen_capture = datagen.capture.sglang_plugin:register\n"
KIMI_WIDE = {
    "hidden_size": 7168, "num_hidden_layers": 6, "num_attention_heads": 56,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 18432,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass
class Measured:
    """One pass over the prompts."""

    tokens_per_s: float
    bytes_per_s: float
    errors: int


def widen(model: Path, out: Path) -> None:
    """A random Llama of Kimi's width with `model`'s vocabulary and tokenizer (about 7 GB in bf16)."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out)
    config = json.loads((model / "config.json").read_text()) | KIMI_WIDE
    (out / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, key = config["num_attention_heads"] * 128, config["num_key_value_heads"] * 128
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": drawn(vocab, hidden),
        "lm_head.weight": drawn(vocab, hidden),
        "model.norm.weight": ones.clone(),
    }
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors |= {
            f"{p}self_attn.q_proj.weight": drawn(query, hidden),
            f"{p}self_attn.k_proj.weight": drawn(key, hidden),
            f"{p}self_attn.v_proj.weight": drawn(key, hidden),
            f"{p}self_attn.o_proj.weight": drawn(hidden, query),
            f"{p}mlp.gate_proj.weight": drawn(inner, hidden),
            f"{p}mlp.up_proj.weight": drawn(inner, hidden),
            f"{p}mlp.down_proj.weight": drawn(hidden, inner),
            f"{p}input_layernorm.weight": ones.clone(),
            f"{p}post_attention_layernorm.weight": ones.clone(),
        }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


class Server:
    """One SGLang process group with the plugin in it."""

    def __init__(self, args: argparse.Namespace, model: Path, folder: Path) -> None:
        self.url, self.spool = f"http://127.0.0.1:{args.port}", Path(args.spool)
        self.log = folder / "server.log"
        site = folder / "site" / "datagen-0.dist-info"
        site.mkdir(parents=True)
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: datagen\nVersion: 0\n")
        (site / "entry_points.txt").write_text(ENTRY_POINTS)
        path = os.pathsep.join([str(site.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "PYTHONPATH": path.rstrip(os.pathsep), "SGLANG_PLUGINS": "datagen_capture",
            "DATAGEN_CAPTURE_DIR": args.spool, "DATAGEN_CAPTURE_BOUNDARIES": args.boundaries,
        }  # fmt: skip
        command = [
            args.python, "-m", "sglang.launch_server", "--model-path", str(model), "--host",
            "127.0.0.1", "--port", str(args.port), "--enable-return-hidden-states", *args.flags,
        ]  # fmt: skip
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, patience_s: float) -> None:
        """Until it answers; ends this script with the log's end when it does not."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    sys.exit("the server did not come up:\n" + self.log.read_text()[-4000:])
            time.sleep(0.5)

    def stop(self) -> None:
        """With all its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


async def measure(
    session: Any, server: Server, prompts: list[list[int]], concurrency: int, *, captures: bool
) -> Measured:
    """Prefill every prompt once."""
    waiting, n_bytes, errors = list(prompts), 0, 0

    def take(path: Path, ids: list[int]) -> int:
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        spooled = read_spool(path)  # header, lengths, checksum
        discard(path)
        if spooled.input_ids != tuple(ids):
            raise RuntimeError(f"{path} holds other ids")
        return spooled.rows.nbytes

    async def worker() -> None:
        nonlocal n_bytes, errors
        while waiting:
            ids, rid = waiting.pop(), uuid.uuid4().hex
            params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1}
            body: dict[str, Any] = {
                "rid": rid, "extra_key": rid, "input_ids": ids, "sampling_params": params
            }  # fmt: skip
            if captures:
                body["return_hidden_states"] = True
                params["custom_params"] = {"datagen": True}
            async with session.post(f"{server.url}/generate", json=body) as response:
                meta = (await response.json())["meta_info"]
            if captures:
                note = meta["datagen"][0]
                if "error" in note or note["rows"] != len(ids):
                    errors += 1
                    print(note)
                else:
                    taken = await asyncio.to_thread(take, Path(note["path"]), ids)
                    n_bytes += taken  # after the await: others have added to it meanwhile

    start = time.perf_counter()
    await asyncio.gather(*[worker() for _ in range(concurrency)])
    seconds = time.perf_counter() - start
    return Measured(sum(map(len, prompts)) / seconds, n_bytes / seconds, errors)


async def compare(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Alternating pairs after a warm-up; medians."""
    import aiohttp

    draw = random.Random(0)
    low, high = (int(x) for x in args.tokens.split(","))
    prompts = [
        [draw.randrange(100, args.vocabulary) for _ in range(draw.randint(low, high))]
        for _ in range(args.prompts)
    ]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for captures in (False, True):
            await measure(session, server, prompts, args.concurrency, captures=captures)
        pairs = []
        for i in range(args.pairs):
            order = (False, True) if i % 2 else (True, False)
            found = {
                c: await measure(session, server, prompts, args.concurrency, captures=c)
                for c in order
            }
            pairs.append((found[False], found[True]))
            print(f"pair {i}: {found[False].tokens_per_s:,.0f} tok/s plain, "
                  f"{found[True].tokens_per_s:,.0f} captured", flush=True)  # fmt: skip
        async with session.get(f"{server.url}/server_info") as answer:
            info = await answer.json()
    return {
        "sglang": info["version"],
        "boundaries": args.boundaries,
        "prompts": args.prompts,
        "concurrency": args.concurrency,
        "plain_tokens_per_s": statistics.median(p.tokens_per_s for p, _ in pairs),
        "captured_tokens_per_s": statistics.median(c.tokens_per_s for _, c in pairs),
        "ratio": statistics.median(c.tokens_per_s / p.tokens_per_s for p, c in pairs),
        "ratios": [c.tokens_per_s / p.tokens_per_s for p, c in pairs],
        "captured_bytes_per_s": statistics.median(c.bytes_per_s for _, c in pairs),
        "errors": sum(c.errors for _, c in pairs),
    }


def main() -> None:
    """Parse, run, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=sys.executable, help="of SGLang's environment")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--widen", action="store_true", help="a random model of 7168 x 6 layers")
    parser.add_argument("--boundaries", default="2,15,27")
    parser.add_argument("--prompts", type=int, default=1500)
    parser.add_argument("--tokens", default="200,500", help="shortest,longest prompt")
    parser.add_argument("--vocabulary", type=int, default=40000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--port", type=int, default=30077)
    parser.add_argument("--spool", default=f"/dev/shm/datagen-bench-{os.getuid()}")
    parser.add_argument("--start-s", type=float, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), args.model
        if args.widen:
            model = folder / "wide"
            widen(args.model, model)
        server = Server(args, model, folder)
        try:
            server.wait(args.start_s)
            result = asyncio.run(compare(args, server))
        finally:
            server.stop()
            shutil.rmtree(args.spool, ignore_errors=True)
    result |= {"model": "random 7168 x 6" if args.widen else args.model.name, "flags": args.flags}
    print(json.dumps(result, indent=2))
    args.out.mkdir(parents=True, exist_ok=True)
    kind = "wide" if args.widen else "own"
    path = args.out / f"sglang-capture-{kind}-{date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
