"""From a real SGLang engine to sealed, encoded shards: sustained raw bytes a second, and what limits it.

    python benchmarks/sglang_shards.py --python PY --model DIR [--widen] --processes 1,4 [-- server flags]
    python benchmarks/sglang_shards.py --null --boundaries 1,3,5 --processes 1

starts one server with the capture plugin (`--null`: drawn rows of Kimi's width in place of an engine, on
any machine), and lets the collector's own code (`collect_prompt` over stored responses: dispatcher, client,
spool, guards, encoders, group commit, seal) capture the same samples onto tmpfs, then onto a disk.
`--processes`: numbers of collectors side by side, each with partitions of its own; the product runs one.
The clock runs from the first request to the last seal, every fsync included; a warm-up goes before, as much
memory as will be needed has been filled once (a virtual machine may get it only then), and every collector
has its compiled loops loaded (1 to 3 s, once a process).
Beside it, in the same run: how fast memory is filled by threads that do nothing else; what the disk syncs
in files of a shard's size, and the codec's ratio, whose product no collector can pass; the CPU time of each
part, and CPU seconds and page faults a GB; the most bytes ever asked for and not yet stored, and ever in
the spool. Runs where this project's environment and the server's can both be started.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import (  # noqa: E402
    busy,
    filled_bytes_per_s,
    most_in,
    mount_of,
    process_seconds,
    synced_bytes_per_s,
    thread_seconds,
)
from benchmarks.sglang_null import Null  # noqa: E402
from benchmarks.sglang_server import KIMI_WIDE, Server, widen  # noqa: E402
from datagen.collect.budget import ByteBudget  # noqa: E402
from datagen.collect.conversation import collect_prompt  # noqa: E402
from datagen.collect.encoding import writers_for  # noqa: E402
from datagen.collect.job import REFIT_SAMPLES  # noqa: E402
from datagen.collect.opening import states_spec  # noqa: E402
from datagen.collect.progress import Progress  # noqa: E402
from datagen.collect.workshop import Workshop, encoders_and_commits  # noqa: E402
from datagen.config import MIB, CollectConfig, collect_config  # noqa: E402
from datagen.fanout.dispatcher import Dispatcher  # noqa: E402
from datagen.fanout.garbage import seldom_collected  # noqa: E402
from datagen.fanout.server import ServerSpec  # noqa: E402
from datagen.store.encoder import Encoder  # noqa: E402
from datagen.store.guards import Guards, examine  # noqa: E402
from datagen.store.layout import PartitionLayout, RunLayout  # noqa: E402
from datagen.store.partition import PartitionStore  # noqa: E402
from datagen.store.plan import PlannedPrompt  # noqa: E402
from datagen.store.responses import Response  # noqa: E402
from datagen.target.client import SGLangClient  # noqa: E402
from datagen.target.profile import load_profile  # noqa: E402

DIGEST = hashlib.sha256(b"benchmark").hexdigest()
PER_PARTITION = 25


def config_of(given: dict[str, Any], share: int) -> CollectConfig:
    """The run's settings for one of `share` collectors."""
    profile = load_profile("smollm2").model_copy(
        update={
            "boundaries": tuple(given["boundaries"]), "hidden_size": given["hidden"],
            "num_layers": given["layers"], "embedded": False,
        }
    )  # fmt: skip
    config = collect_config(
        endpoints=given["url"], spool_mib=max(given["spool_mib"] // share, 256),
        concurrency=given["concurrency"] // share, max_concurrency=given["concurrency"] // share,
        shard_mib=given["shard_mib"],
    )  # fmt: skip
    return config.model_copy(update={"profile": profile})


def planned(number: int, tokens: int) -> PlannedPrompt:
    """A prompt whose response is stored already."""
    return PlannedPrompt(
        prompt_id=hashlib.sha256(f"benchmark {number}".encode()).hexdigest(),
        messages='[{"content":"a question","role":"user"}]', tools=None, thinking=None, split="train",
        n_turns=1, prompt_tokens=tokens // 3, max_new_tokens=tokens, source="benchmark", category=None,
        language="en", licence="CC0-1.0", partition=number // PER_PARTITION,
    )  # fmt: skip


def response(prompt: PlannedPrompt, tokens: int, vocabulary: int, url: str) -> Response:
    """What it was answered: drawn ids, a third of them context."""
    draw = np.random.default_rng(int(prompt.prompt_id[:12], 16))
    ids = draw.integers(100, vocabulary, tokens, dtype=np.int32)
    n = tokens // 3
    return Response(
        prompt_id=prompt.prompt_id, turn=0, context_ids=ids[:n], response_ids=ids[n:], text="",
        finish_reason="stop", stop_reason_detail=None, prompt_tokens=n, completion_tokens=tokens - n,
        cached_tokens=0, num_retractions=0, spec_verify_ct=None, seed=None, endpoint=url, attempts=1,
        queue_s=0.0, server_s=0.0,
    )  # fmt: skip


def warm_up(config: CollectConfig) -> None:
    """Load what the first sample of a process would have to wait for."""
    spec = states_spec(config)
    rows_TW = np.random.default_rng(0).integers(0x3F00, 0x4000, (64, spec.width), dtype=np.uint16)
    examine(rows_TW, len(rows_TW), spec)
    Encoder(spec)(rows_TW)


async def capture_all(
    given: dict[str, Any], share: int, root: Path, samples: list[tuple[int, int]], gate: Any
) -> dict[str, Any]:
    """One collector: store the responses, then (`gate`) capture, encode and seal everything."""
    config, layout = config_of(given, share), RunLayout(root)
    url = config.endpoints[0]
    encoder, limit = Encoder(states_spec(config), refit_after=REFIT_SAMPLES), given["concurrency"]
    most_held = 0
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(SGLangClient(url))
        specs = [ServerSpec(client, limit=limit // share)]
        stack.enter_context(seldom_collected())
        encoders, commits = stack.enter_context(encoders_and_commits(config))
        dispatcher = await stack.enter_async_context(
            Dispatcher(specs, config.dispatch, held=lambda: commits.crowded)
        )
        shop = Workshop(
            config=config, renderer=None,  # every prompt has its answer
            dispatcher=dispatcher, commits=commits,
            encoders=encoders, budget=ByteBudget(config.spool_mib * MIB),
            progress=Progress(time.monotonic),
            guards=Guards(states_spec(config), max_fault_rate=config.max_fault_rate),
            context_length=config.profile.context_length,
        )  # fmt: skip
        opened: list[tuple[PartitionLayout, PartitionStore, list[PlannedPrompt]]] = []
        for first in range(0, len(samples), PER_PARTITION):
            mine = samples[first : first + PER_PARTITION]
            where = layout.partition(mine[0][0] // PER_PARTITION)
            store = PartitionStore.open(
                where, fingerprint_digest=DIGEST, spec=states_spec(config),
                shard_bytes=config.shard_mib * MIB, encoder=encoder,
            )  # fmt: skip
            prompts = [planned(number, tokens) for number, tokens in mine]
            for prompt, (_, tokens) in zip(prompts, mine, strict=True):
                store.add_response(response(prompt, tokens, given["vocabulary"], url))
            store.commit()
            opened.append((where, store, prompts))

        async def watch() -> None:
            nonlocal most_held
            while True:
                most_held = max(most_held, shop.budget.held)
                await asyncio.sleep(0.02)

        async def partition(store: PartitionStore, prompts: list[PlannedPrompt]) -> None:
            async with asyncio.TaskGroup() as conversations:
                for prompt in prompts:
                    conversations.create_task(collect_prompt(shop, store, prompt))
            await shop.commit(store, lambda s: s.seal(len(prompts)))

        warm_up(config)
        await asyncio.to_thread(gate.wait)
        before, own = thread_seconds(), process_seconds([os.getpid()])
        start, used_before = time.time(), busy()
        watching = asyncio.create_task(watch())
        async with asyncio.TaskGroup() as group:
            for _, store, prompts in opened:
                group.create_task(partition(store, prompts))
        end, used_after = time.time(), busy()
        watching.cancel()
        used = thread_seconds() - before
        own = process_seconds([os.getpid()]) - own
        counts = [store.counts() for _, store, _ in opened]
        for _, store, _ in opened:
            store.close()
    return {
        "start": start, "end": end, "busy": (used_before, used_after), "most_held": most_held,
        "collected": sum(c.collected for c in counts), "rejects": [c.rejects for c in counts if c.rejects],
        "cpu_s": dict(used), "own": dict(own), "writers": writers_for(wide=config.profile.wide),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def collector(
    given: dict[str, Any],
    share: int,
    root: Path,
    samples: list[tuple[int, int]],
    gate: Any,
    out: Any,
) -> None:
    """Entry of a collector's process."""
    out.put(uvloop.run(capture_all(given, share, root, samples, gate)))


def run(
    given: dict[str, Any], processes: int, root: Path, seconds: float, rate: float
) -> dict[str, Any]:
    """Collect about `seconds` worth of samples at `rate` raw bytes a second with so many collectors."""
    draw = random.Random(len(str(root)))
    low, high = given["tokens"]
    row = (len(given["boundaries"]) + 1) * given["hidden"] * 2
    lengths: list[int] = []
    while sum(lengths) * row < seconds * rate or len(lengths) % (PER_PARTITION * processes):
        lengths.append(draw.randint(low, high))
    context = multiprocessing.get_context("spawn")
    gate, out = context.Barrier(processes), context.Queue()
    block = len(lengths) // processes
    started = []
    for i in range(processes):
        mine = list(enumerate(lengths))[i * block : (i + 1) * block]
        arguments = (given, processes, root / str(i), mine, gate, out)
        started.append(context.Process(target=collector, args=arguments, daemon=True))
    with most_in(Path(given["spool"])) as spooled:
        for process in started:
            process.start()
        found = [out.get(timeout=300) for _ in started]
    wall = max(f["end"] for f in found) - min(f["start"] for f in found)
    used = max(f["busy"][1] for f in found) - min(f["busy"][0] for f in found)
    for process in started:
        process.join()
    if sum(f["collected"] for f in found) != len(lengths):
        sys.exit(f"{sum(f['collected'] for f in found)} of {len(lengths)} samples: {found}")
    raw, stored = sum(lengths) * row, sum(f.stat().st_size for f in root.rglob("states-*.arrow"))
    cpu: Counter[str] = sum((Counter(f["cpu_s"]) for f in found), Counter())
    shutil.rmtree(root)
    return {
        "processes": processes, "samples": len(lengths), "tokens": sum(lengths), "seconds": wall,
        "raw_bytes_per_s": raw / wall, "tokens_per_s": sum(lengths) / wall, "codec_ratio": raw / stored,
        "writers": found[0]["writers"],
        "most_bytes_asked_for": sum(f["most_held"] for f in found), "cap_bytes": given["spool_mib"] * MIB,
        "most_bytes_in_spool": spooled[0], "machine_cpus_busy": used / wall,
        "peak_rss": max(f["peak_rss"] for f in found),
        "cpus_of_parts": {k: round(v / wall, 2) for k, v in cpu.most_common() if v > 0.02},
        "per_gb": {
            k: round(sum(f["own"].get(k, 0) for f in found) / raw * 1e9, 3)
            for k in ("user", "system", "faults")
        },
    }  # fmt: skip


def main() -> None:
    """Parse, run, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=sys.executable, help="of SGLang's environment")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--widen", action="store_true", help="a random model of 7168 x 6 layers")
    parser.add_argument("--boundaries", default="2,15,27")
    parser.add_argument("--processes", default="1,4", help="numbers of collectors to compare")
    parser.add_argument("--tokens", default="300,900", help="shortest,longest sample")
    parser.add_argument("--vocabulary", type=int, default=40000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--spool-mib", type=int, default=8192, help="cap of bytes in flight")
    parser.add_argument("--null", action="store_true", help="drawn rows of Kimi's width, no engine")
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8, help="of each run, at 3 GB/s")
    parser.add_argument("--rate", type=float, default=3e9)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--port", type=int, default=30079)
    parser.add_argument("--spool", default=f"/dev/shm/datagen-shards-{os.getuid()}")
    parser.add_argument("--start-s", type=float, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), args.model
        if args.widen:
            model = folder / "wide"
            widen(args.model, model)
        shape = KIMI_WIDE if args.null else json.loads((model / "config.json").read_text())
        given = {
            "url": f"http://127.0.0.1:{args.port}", "spool": args.spool, "vocabulary": args.vocabulary,
            "boundaries": [int(b) for b in args.boundaries.split(",")], "hidden": shape["hidden_size"],
            "layers": shape["num_hidden_layers"], "concurrency": args.concurrency,
            "spool_mib": args.spool_mib, "shard_mib": args.shard_mib,
            "tokens": [int(x) for x in args.tokens.split(",")],
        }  # fmt: skip
        server: Null | Server
        if args.null:
            server = Null(args.port, args.spool, args.boundaries, shape["hidden_size"])
        else:
            server = Server(SimpleNamespace(**vars(args)), model, folder)  # type: ignore[arg-type]
        try:
            server.wait(args.start_s)
            result = measured(args, given, [int(n) for n in args.processes.split(",")])
            result |= {"sglang": server.info()["version"]}
        finally:
            server.stop()
            shutil.rmtree(args.spool, ignore_errors=True)
    kind = "null" if args.null else "shards"
    name_of_model = (
        "none: drawn rows" if args.null else "random 7168 x 6" if args.widen else model.name
    )
    result |= {"cpus": os.cpu_count(), "boundaries": args.boundaries, "flags": args.flags,
        "concurrency": args.concurrency, "tokens": args.tokens, "model": name_of_model}  # fmt: skip
    print(json.dumps(result, indent=2))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"sglang-capture-{kind}-{date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measured(args: argparse.Namespace, given: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """Memory with every number of collectors, then the disk with the best of them."""
    base = f"datagen-shards-{os.getpid()}"
    needed = int(args.seconds * args.rate * 0.7) + given["spool_mib"] * MIB
    threads = min(os.cpu_count() or 1, 16)
    about: dict[str, Any] = {"memory_mount": mount_of(args.memory)}
    about["memory_filled_bytes_per_s"] = [
        filled_bytes_per_s(args.memory / base, needed, threads) for _ in range(2)
    ]
    run(given, counts[-1], args.memory / base, args.seconds / 4, args.rate)  # warm-up
    memory = []
    for count in counts:
        memory.append(run(given, count, args.memory / base, args.seconds, args.rate))
        print(f"memory: {json.dumps(memory[-1])}", flush=True)
    best = max(memory, key=lambda r: float(r["raw_bytes_per_s"]))
    shard, files = args.shard_mib * MIB, best["processes"] * best["writers"]

    def synced() -> dict[str, float]:
        where = args.disk / base
        return {
            "whole_shards": synced_bytes_per_s(where, shard, files),
            "every_64_mib": synced_bytes_per_s(where, shard, files, 64 * MIB),
        }

    before = synced()
    disk = run(given, best["processes"], args.disk / base, args.seconds, args.rate)
    after = synced()
    for how in before:
        rate = statistics.mean((before[how], after[how]))
        disk[f"synced_bytes_per_s_{how}"] = rate
        disk[f"of_the_limit_{how}"] = disk["raw_bytes_per_s"] / (rate * disk["codec_ratio"])
    return {**about, "memory": memory, "disk": disk}


if __name__ == "__main__":
    main()
