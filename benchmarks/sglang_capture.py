"""What capturing costs a real SGLang server: prefill with and without, side by side on one server.

    python benchmarks/sglang_capture.py --python PY --model DIR --boundaries 2,15,27 [-- server flags]

starts one server with the plugin (of this checkout, put in front of its environment) and alternates three
passes over the same prompts: `plain`, prefilled and nothing else; `light`, captured, each file
unlinked unread, which leaves the plugin's own cost; `full`, captured, each file's header, lengths and
checksum verified, which adds a reader's on the same machine. The load, the readers and the server are
processes of their own on CPUs of their own where there are enough. `--widen` first writes a random model of
Kimi-K2.5's width. Needs the standard library, aiohttp, and torch for --widen; not the rest of this
project's environment, so that it runs in SGLang's own. Example on one Hopper GPU, triton attention:
    ... --boundaries 2,15,27 --concurrency 256 -- --attention-backend triton --sampling-backend pytorch
        --grammar-backend none --mem-fraction-static 0.6 --chunked-prefill-size 8192
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.sglang_server import Server, bind, split_cpus, widen  # noqa: E402
from datagen.capture.spool import NAME, SUFFIX, discard, read_spool  # noqa: E402

READERS = 3
OPTED = {"datagen": True}
PASSES: dict[str, dict[str, bool] | None] = {"plain": None, "light": OPTED, "full": OPTED}
"""By name, the custom_params of each request."""


@dataclass
class Measured:
    """One pass over the prompts. `tokens_per_s`: until the last answer; `_gone`: until the last file."""

    tokens_per_s: float
    tokens_per_s_gone: float
    bytes_per_s: float
    errors: int


def read_for_ever(
    folder: Path, share: int, of: int, cpu: int | None, reads: Any, files: Any, n_bytes: Any
) -> None:
    """Take this reader's share of the files as they appear: read and verify, or only unlink."""
    bind(cpu)
    while True:
        found = 0
        for entry in os.scandir(folder):
            name = entry.name
            if not NAME.fullmatch(name) or int(name[:2], 16) % of != share:
                continue
            if not name.endswith(SUFFIX):
                if name.endswith(".err"):
                    raise RuntimeError(Path(entry.path).read_text())
                continue
            path, found = Path(entry.path), found + 1
            size = read_spool(path).rows.nbytes if reads.value else entry.stat().st_size
            discard(path)
            n_bytes[share] += size
            files[share] += 1
        if not found:
            time.sleep(0.001)


class Readers:
    """The processes that empty the spool, and what they have taken."""

    def __init__(self, folder: Path, cpus: Sequence[int | None]) -> None:
        self._reads = multiprocessing.Value("b", 0)
        self._files = multiprocessing.Array("q", len(cpus))
        self._bytes = multiprocessing.Array("q", len(cpus))
        self._processes = [
            multiprocessing.Process(
                target=read_for_ever,
                args=(folder, i, len(cpus), cpu, self._reads, self._files, self._bytes),
                daemon=True,
            )
            for i, cpu in enumerate(cpus)
        ]
        for process in self._processes:
            process.start()

    def mode(self, *, reads: bool) -> None:
        """Whether files are read before they are unlinked."""
        self._reads.value = reads

    def taken(self) -> tuple[int, int]:
        """Files and bytes so far. Exits when a reader has failed."""
        if not all(p.is_alive() for p in self._processes):
            sys.exit("a reader of the spool has failed")
        return sum(self._files), sum(self._bytes)

    def stop(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()


async def measure(
    session: Any,
    url: str,
    readers: Readers,
    prompts: list[list[int]],
    concurrency: int,
    opted: dict[str, Any] | None,
) -> Measured:
    """Prefill every prompt once. `opted`: custom_params of a capture, None without one."""
    waiting, errors, captured = list(prompts), 0, 0
    files, n_bytes = readers.taken()

    async def worker() -> None:
        nonlocal errors, captured
        while waiting:
            ids, rid = waiting.pop(), uuid.uuid4().hex
            params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1}
            body: dict[str, Any] = {
                "rid": rid, "extra_key": rid, "input_ids": ids, "sampling_params": params
            }  # fmt: skip
            if opted:
                body["return_hidden_states"] = True
                params["custom_params"] = opted
            async with session.post(f"{url}/generate", json=body) as response:
                meta = (await response.json())["meta_info"]
            if opted:
                note = meta["datagen"][0]
                if "error" in note or note["rows"] != len(ids):
                    errors += 1
                    print(note, flush=True)
                else:
                    captured += 1

    start = time.perf_counter()
    await asyncio.gather(*[worker() for _ in range(concurrency)])
    answered = time.perf_counter() - start
    while readers.taken()[0] < files + captured:
        await asyncio.sleep(0.001)
        if time.perf_counter() - start > answered + 60:
            sys.exit(f"{files + captured - readers.taken()[0]} files never appeared")
    gone = time.perf_counter() - start
    tokens = sum(map(len, prompts))
    return Measured(tokens / answered, tokens / gone, (readers.taken()[1] - n_bytes) / gone, errors)


async def compare(args: argparse.Namespace, server: Server, readers: Readers) -> dict[str, Any]:
    """Alternating passes after a warm-up; medians of the ratios within a round."""
    import aiohttp

    draw = random.Random(0)
    low, high = (int(x) for x in args.tokens.split(","))
    prompts = [
        [draw.randrange(100, args.vocabulary) for _ in range(draw.randint(low, high))]
        for _ in range(args.prompts)
    ]
    rounds: list[dict[str, Measured]] = []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=1800)
    ) as session:
        for number in range(-1, args.pairs):  # the first is the warm-up
            at, kinds = number % len(PASSES), list(PASSES)
            found = {}
            for kind in (*kinds[at:], *kinds[:at]):
                readers.mode(reads=kind == "full")
                found[kind] = await measure(
                    session, server.url, readers, prompts, args.concurrency, PASSES[kind]
                )
            print(f"round {number}: " + ", ".join(
                f"{k} {m.tokens_per_s:,.0f}" for k, m in found.items()) + " tok/s",
                flush=True)  # fmt: skip
            if number >= 0:
                rounds.append(found)
    result: dict[str, Any] = {"sglang": server.info()["version"], "boundaries": args.boundaries,
        "prompts": args.prompts, "concurrency": args.concurrency, "cpus": os.cpu_count(),
        "plain_tokens_per_s": statistics.median(r["plain"].tokens_per_s for r in rounds)}  # fmt: skip
    for kind in [k for k, opted in PASSES.items() if opted]:
        ratios = [r[kind].tokens_per_s / r["plain"].tokens_per_s for r in rounds]
        gone = [r[kind].tokens_per_s_gone / r["plain"].tokens_per_s for r in rounds]
        result[kind] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "ratio_until_last_file": statistics.median(gone),
            "tokens_per_s": statistics.median(r[kind].tokens_per_s for r in rounds),
            "bytes_per_s": statistics.median(r[kind].bytes_per_s for r in rounds),
            "errors": sum(r[kind].errors for r in rounds),
        }
    return result | {"rounds": [{k: asdict(m) for k, m in r.items()} for r in rounds]}


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
    parser.add_argument("--pairs", type=int, default=5, help="rounds of the three passes")
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
        cpus, own = split_cpus(1 + READERS)
        bind(own[0])
        Path(args.spool).mkdir(mode=0o700, parents=True, exist_ok=True)
        readers = Readers(Path(args.spool), own[1:])
        server = Server(args, model, folder, cpus)
        try:
            server.wait(args.start_s)
            result = asyncio.run(compare(args, server, readers))
        finally:
            server.stop()
            readers.stop()
            shutil.rmtree(args.spool, ignore_errors=True)
    result |= {
        "model": "random 7168 x 6" if args.widen else args.model.name, "flags": args.flags,
        "cpus_apart": cpus is not None,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    args.out.mkdir(parents=True, exist_ok=True)
    kind = "wide" if args.widen else "own"
    path = args.out / f"sglang-capture-{kind}-{date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
