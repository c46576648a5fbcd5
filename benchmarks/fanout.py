"""The fan-out against a server that takes exactly known time: client cost, makespan, kills, resume.

python -m benchmarks.fanout                    # everything, an hour
python -m benchmarks.fanout cpu kills          # some parts
python -m benchmarks.fanout cpu --specforge PATH --speculators PATH --peer-python PYTHON

cpu       client CPU of a 1,000-token response, HTTP to journal: <= 0.5 ms, >= 2,000 rows/s and core at
          1,024 in flight, <= 150 MB; a bare aiohttp loop and the peers' scripts beside it
memory    peak of 83,000 rows and of 1.4 million: < 20 MB apart
makespan  4 servers, lognormal lengths of two kinds, against tokens / capacity: <= 1.02, with one
          server killed at 40 % and back 10 s later <= 1.05, with one half as fast <= 1.08; beside it a
          static split and round-robin
kills     SIGKILL of the client at 200 random moments, ten of a run, then its end: the rows of an
          undisturbed run, each once; redone rows <= those in flight + 1 s of work
resume    opening the journals of 83,000 and of 1.4 million rows: < 0.3 s, < 2 s

Needs a C compiler for nullserver.c.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.fanout_bench import ANSWER_TOKENS, ROOT, Bench, Result
from benchmarks.fanout_client import DIGEST, prompt_id
from benchmarks.fanout_kills import kills
from benchmarks.fanout_makespan import CASES, makespan
from datagen.embedded.weights import ensure_checkpoint
from datagen.store.journal import Entry, Journal, Kind, read_journal
from datagen.store.layout import RunLayout

STEP_US = 5


RAW = """
import asyncio, resource, sys, time
import aiohttp, orjson, uvloop
rows, width, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
async def main():
    numbers = iter(range(rows))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async def worker():
            for i in numbers:
                body = orjson.dumps({"rid": str(i), "input_ids": list(range(100)),
                                     "sampling_params": {"max_new_tokens": 1000}})
                async with session.post(url + "/generate", data=body) as answer:
                    orjson.loads(await answer.read())
        cpu = time.process_time()
        await asyncio.gather(*(worker() for _ in range(width)))
        print((time.process_time() - cpu) / rows * 1e3)
uvloop.run(main())
"""


def cpu(bench: Bench, args: argparse.Namespace) -> Result:
    """Client CPU a row, alternating with a bare aiohttp loop at the same width."""
    ours: list[Result] = []
    raw: list[float] = []
    rows = 10_000
    with bench.serving(STEP_US, slots=4096) as (_, ports):
        for n in range(3):
            run = bench.folder / f"cpu-{n}"
            ours.append(bench.drive(ports, run, rows=rows, window=1024, mean=ANSWER_TOKENS))
            shutil.rmtree(run)
            url = f"http://127.0.0.1:{ports[0]}"
            said = subprocess.run(
                [sys.executable, "-c", RAW, str(rows), "1024", url],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            raw.append(float(said.stdout))
    with bench.serving(STEP_US, slots=4096, chat=True) as (_, ports):
        peers = {
            name: peer_cpu(bench, name, getattr(args, name), args.peer_python, ports[0])
            for name in ("specforge", "speculators")
        }
    each = [o["cpu_s"] / rows * 1e3 for o in ours]
    mine, rss = median(each), max(o["peak_rss_mib"] for o in ours)
    result: Result = {
        "cpu_ms_per_row": each,
        "bare_aiohttp_ms_per_row": raw,
        "rows_per_s_and_core": 1e3 / mine,
        "peak_rss_mib": rss,
        "peers_cpu_ms_per_row": peers,
        "passed": mine <= 0.5 and 1e3 / mine >= 2000 and rss * 2**20 <= 150e6,
    }
    for name, factor in (("specforge", 40), ("speculators", 2)):
        if isinstance(peers[name], float):
            result[f"times_below_{name}"] = peers[name] / mine
            result["passed"] = result["passed"] and peers[name] / mine >= factor
    return result


FEW, MANY = 64, {"specforge": 264, "speculators": 4064}


def peer_cpu(bench: Bench, name: str, script: Path | None, python: str, port: int) -> float | str:
    """CPU in ms a row of a peer's regenerate script against a chat endpoint, start-up taken off."""
    if script is None:
        return f"skipped: give --{name} the path of its script"
    used: dict[int, float] = {}
    for rows in (FEW, MANY[name]):
        # speculators names a data set of the hub; a folder of that name where it runs is taken for it
        folder = bench.folder / f"{name}-{rows}"
        prompts, out = folder / "HuggingFaceH4/ultrachat_200k/train_sft.jsonl", folder / "out.jsonl"
        prompts.parent.mkdir(parents=True)
        turns = [{"role": "user", "content": "word " * 80}]
        lines = [
            json.dumps({"id": str(i), "conversations": turns, "messages": turns})
            for i in range(rows)
        ]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if name == "specforge":
            flags = ["--model", "null", "--concurrency", "64", "--max-tokens", str(ANSWER_TOKENS),
                     "--server-address", f"127.0.0.1:{port}", "--input-file-path", prompts,
                     "--output-file-path", out]  # fmt: skip
        else:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            flags = ["--model", ensure_checkpoint(), "--concurrency", "256", "--endpoint", url,
                     "--max-tokens", str(ANSWER_TOKENS), "--dataset", "ultrachat", "--split", "train",
                     "--outfile", out]  # fmt: skip
        before = os.times()
        done = subprocess.run(
            [python, script.resolve(), *flags], capture_output=True, text=True, cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)},
        )  # fmt: skip
        after = os.times()
        written = len(out.read_text().splitlines()) if out.exists() else 0
        if done.returncode or written != rows:
            return f"failed, {written} of {rows} rows: {done.stderr.strip().splitlines()[-1:]}"
        used[rows] = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return (used[MANY[name]] - used[FEW]) / (MANY[name] - FEW) * 1e3


def memory(bench: Bench, args: argparse.Namespace) -> Result:
    """Peak memory at 1,024 in flight, short answers, few rows and many."""
    peaks = {}
    with bench.serving(STEP_US, slots=4096, tokens=20) as (_, ports):
        for rows in (83_000, args.many):
            run = bench.folder / "memory"
            peaks[rows] = bench.drive(ports, run, rows=rows, window=1024, mean=20)["peak_rss_mib"]
            shutil.rmtree(run)
    few, many = peaks.values()
    mb = 2**20 / 1e6
    return {"peak_rss_mib": peaks, "passed": (many - few) * mb < 20 and many * mb <= 150}


def resume(bench: Bench, _: argparse.Namespace) -> Result:
    """Reading the journals of a run, nothing else: what resuming waits for."""
    took: dict[int, list[float]] = {}
    for rows in (83_000, 1_400_000):
        layout = RunLayout(bench.folder / f"resume-{rows}")
        each = 5000
        for index in range(-(-rows // each)):
            partition = layout.partition(index)
            partition.root.mkdir(parents=True)
            journal, _ = Journal.open(partition.journal, DIGEST)
            for row in range(index * each, min((index + 1) * each, rows)):
                journal.append(Entry(Kind.RESPONSE, prompt_id(row), 0, 0, row, 1000, 1, 0))
            journal.sync()
            journal.close()
        took[rows] = []
        for _ in range(5):
            began = time.perf_counter()
            found = sum(
                len(read_journal(layout.partition(i).journal, DIGEST))
                for i in range(-(-rows // each))
            )
            took[rows].append(time.perf_counter() - began)
            assert found == rows
    small, large = (median(t) for t in took.values())
    return {"open_s": took, "passed": small < 0.3 and large < 2.0}


PARTS = {"cpu": cpu, "memory": memory, "makespan": makespan, "kills": kills, "resume": resume}


def main() -> int:
    """Run the parts; prints a line each, writes results/, exits 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--specforge", type=Path, help="its scripts/regenerate_train_data.py")
    parser.add_argument(
        "--speculators", type=Path, help="its scripts/response_regeneration/script.py"
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter with what their scripts import"
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32_000, help="of makespan")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="of makespan; all when not given")
    parser.add_argument("--many", type=int, default=1_400_000, help="rows of memory's longer run")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    out = ROOT / "benchmarks" / "results" / f"fanout-{time.strftime('%Y-%m-%d')}.json"
    missed = False
    with tempfile.TemporaryDirectory(prefix="fanout-") as folder:
        bench = Bench(Path(folder))
        for name in args.parts or PARTS:
            result = {"load_average": os.getloadavg()[0], **PARTS[name](bench, args)}
            kept: Result = json.loads(out.read_text()) if out.exists() else {}
            if name == "makespan":  # its cases may be run one by one
                result = {**{c: kept[name][c] for c in CASES if c in kept.get(name, {})}, **result}
                result["passed"] = all(result[c]["passed"] for c in CASES if c in result)
            missed |= not result["passed"]
            kept[name] = result
            shown = {k: v for k, v in result.items() if k != "log"}
            print(
                f"{'pass' if result['passed'] else 'MISS'}  {name}: {json.dumps(shown)}", flush=True
            )
            out.write_text(json.dumps({"cpus": os.cpu_count(), **kept}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
