"""The fan-out against a server that takes exactly known time: client cost, makespan, kills, resume.

python benchmarks/fanout.py                  # everything, an hour
python benchmarks/fanout.py cpu kills        # some parts
python benchmarks/fanout.py cpu --specforge PATH --speculators PATH --peer-python PYTHON

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
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fanout_client import DIGEST, forked, prompt_id
from datagen.embedded.weights import ensure_checkpoint
from datagen.store.journal import Entry, Journal, Kind, read_journal
from datagen.store.layout import RunLayout
from datagen.store.responses import ResponsesReader

ROOT = Path(__file__).resolve().parents[1]
Result = dict[str, Any]
STEP_US = 5
ANSWER_TOKENS = 1000
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.fanout_client"])


def answer(tokens: int = ANSWER_TOKENS) -> bytes:
    """A response of `tokens`, as SGLang's /generate words it."""
    meta = {
        "id": "x", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 100,
        "completion_tokens": tokens, "cached_tokens": 0, "e2e_latency": 1.0,
    }  # fmt: skip
    body = {"text": text(tokens), "output_ids": token_ids(tokens), "meta_info": meta}
    return json.dumps(body).encode()


def chat_answer(tokens: int = ANSWER_TOKENS) -> bytes:
    """The same as /v1/chat/completions words it, with the ids that speculators asks for."""
    message = {"role": "assistant", "content": text(tokens)}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop",
        "token_ids": token_ids(tokens),
    }
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": tokens + 100}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "null", "usage": usage,
            "choices": [choice], "prompt_token_ids": list(range(100))}  # fmt: skip
    return json.dumps(body).encode()


def token_ids(tokens: int) -> list[int]:
    """Ids as a model with a vocabulary of tens of thousands gives them, and a stop token."""
    return [1000 + 37 * i % 30000 for i in range(tokens - 1)] + [2]


def text(tokens: int) -> str:
    """Some words for so many tokens."""
    return " ".join(f"word{i % 97}" for i in range(int(tokens * 0.74)))


class Bench:
    """A compiled server, a folder, and clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.binary = folder, folder / "nullserver"
        source = ROOT / "benchmarks" / "nullserver.c"
        subprocess.run(["cc", "-O2", "-o", self.binary, source, "-lm"], check=True)
        self._ports = iter(range(random.randint(20000, 40000), 65000))

    def server(
        self, *, slots: int, step_us: float, body: bytes, port: int = 0
    ) -> tuple[subprocess.Popen[str], int]:
        """A server on a port of its own, that answers `body`; wait for it."""
        said = self.folder / f"body-{hashlib.sha256(body).hexdigest()[:8]}.json"
        said.write_bytes(body)
        while True:
            at = port or next(self._ports)
            process = subprocess.Popen(
                [self.binary, str(at), str(slots), str(step_us), said],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert process.stdout is not None
            if process.stdout.readline().strip() == "serving":
                return process, at

    @contextmanager
    def serving(
        self, *steps_us: float, slots: int, tokens: int = ANSWER_TOKENS, chat: bool = False
    ) -> Iterator[tuple[list[subprocess.Popen[str]], list[int]]]:
        """One server for each step time."""
        body = chat_answer(tokens) if chat else answer(tokens)
        made = [self.server(slots=slots, step_us=s, body=body) for s in steps_us]
        processes, ports = [m[0] for m in made], [m[1] for m in made]
        try:
            yield processes, ports
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def client(self, ports: Sequence[int], run: Path, **flags: Any) -> subprocess.Popen[str]:
        """A client; returned once it begins."""
        urls = [f"http://127.0.0.1:{p}" for p in ports]
        arguments = [str(x) for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", v)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fanout_client", "--run", run, *arguments, "--urls", *urls],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline().strip() != "started":
            raise RuntimeError("the client did not start")
        return process

    def drive(self, ports: Sequence[int], run: Path, **flags: Any) -> Result:
        """A client from its beginning to its end."""
        return finish(self.client(ports, run, **flags))


def finish(client: subprocess.Popen[str]) -> Result:
    """What a client says at its end."""
    out, _ = client.communicate()
    if client.returncode:
        raise RuntimeError(f"the client failed: {client.returncode}")
    result: Result = json.loads(out)
    return result


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
    return {"peak_rss_mib": peaks, "passed": many - few < 20 and many <= 150}


MEAN_S, SIGMA, MOST, SLOTS, ONE_LONG_IN = 0.4, 0.6, 4.0, 32, 10
CASES = {
    "shared": 1.02,
    "killed": 1.05,
    "slow": 1.08,
    "static": None,
    "round-robin": None,
    "static slow": None,
}
"""Each with the most it may take of the ideal; those of the peers' kind are for comparison."""


def makespan(bench: Bench, args: argparse.Namespace) -> Result:
    """Wall time against tokens / capacity, undisturbed, disturbed, and as peers bind rows."""
    return {name: one_makespan(bench, name, args.rows) for name in args.cases or CASES}


def one_makespan(bench: Bench, name: str, rows: int) -> Result:
    """One case."""
    step_us = MEAN_S * 1e6 / ANSWER_TOKENS
    steps = [step_us] * 3 + [step_us * 2 if "slow" in name else step_us]
    policy = name.split()[0] if name.split()[0] in ("static", "round-robin") else "shared"
    run = bench.folder / name.replace(" ", "-")
    chaos = None
    with bench.serving(*steps, slots=SLOTS, tokens=50) as (processes, ports):
        if name == "killed":
            after_s = 0.4 * rows * MEAN_S / (4 * SLOTS)
            chaos = threading.Thread(
                target=outage, args=(bench, processes, ports[0], step_us, after_s)
            )
        client = bench.client(
            ports, run, mean=ANSWER_TOKENS, sigma=SIGMA, most=MOST, rows=rows, partition=100,
            one_long_in=ONE_LONG_IN, window=SLOTS, policy=policy,
            limit=SLOTS + (8 if policy == "shared" else 0),
        )  # fmt: skip
        if chaos:
            chaos.start()
        took = finish(client)
        if chaos:
            chaos.join()
    shutil.rmtree(run)
    capacity = sum(step_us / s for s in steps) * SLOTS
    lost_s = OUTAGE_S * SLOTS if chaos else 0.0
    ideal_s = (took["tokens"] * step_us * 1e-6 + lost_s) / capacity
    over, bar = took["wall_s"] / ideal_s, CASES[name]
    result: Result = {
        "load_average": os.getloadavg()[0], "rows": rows, "slots": 4 * SLOTS, "bar": bar,
        "wall_s": took["wall_s"], "ideal_s": ideal_s, "over_ideal": over,
        "longest_share": took["longest"] * max(steps) * 1e-6 / ideal_s, "asked": took["asked"],
        "passed": bar is None or over <= bar,
    }  # fmt: skip
    print(f"      {name}: {result}", flush=True)
    return result


OUTAGE_S = 10.0


def outage(
    bench: Bench, processes: list[subprocess.Popen[str]], port: int, step_us: float, after_s: float
) -> None:
    """SIGKILL the first server, and start it again ten seconds later."""
    time.sleep(after_s)
    processes[0].kill()
    processes[0].wait()
    time.sleep(OUTAGE_S)
    processes[0] = bench.server(slots=SLOTS, step_us=step_us, body=answer(50), port=port)[0]


def stored(run: Path, rows: int) -> Counter[tuple[str, int, bytes]]:
    """What is on disk, sealed: prompt, turn and ids of each response, and how often."""
    layout = RunLayout(run)
    seen: Counter[tuple[str, int, bytes]] = Counter()
    for index in range(-(-rows // KILL_PARTITION)):
        partition = layout.partition(index)
        for number in partition.numbers("responses"):
            seen.update(
                (r.prompt_id, r.turn, r.response_ids.tobytes())
                for r in ResponsesReader(partition.responses(number))
            )
    return seen


KILL_ROWS, KILL_WINDOW, KILL_PARTITION, KILLS_OF_A_RUN = 2000, 64, 100, 10
KILL_RATE = 64 / 0.05  # rows a second of its server


def kills(bench: Bench, args: argparse.Namespace) -> Result:
    """SIGKILL at random moments between the first row and the last, ten of each run; then its end.

    What is on disk is compared with an undisturbed run; rows asked for in vain are counted by the server.
    """
    log: list[Result] = []
    flags = ["--rows", KILL_ROWS, "--window", KILL_WINDOW, "--limit", KILL_WINDOW, "--mean", 1000,
             "--sigma", 0.5, "--partition", KILL_PARTITION]  # fmt: skip
    with bench.serving(50, slots=64, tokens=50) as (_, ports):
        url = f"http://127.0.0.1:{ports[0]}"

        def client(run: Path) -> BaseProcess:
            arguments = [*map(str, flags), "--run", str(run), "--urls", url]
            process = FORKS.Process(target=forked, args=(arguments,))
            process.start()
            return process

        def whole(run: Path) -> Counter[tuple[str, int, bytes]]:
            process = client(run)
            process.join()
            if process.exitcode:
                raise RuntimeError(f"the client failed: {process.exitcode}")
            found = stored(run, KILL_ROWS)
            shutil.rmtree(run)
            return found

        undisturbed = whole(bench.folder / "undisturbed")
        good = undisturbed.total() == len(undisturbed) == KILL_ROWS
        seed = -1
        while good and len(log) < args.kills:
            seed += 1
            run, rng = bench.folder / f"kill-{seed}", random.Random(seed)
            of_run: list[Result] = []
            for moment in sorted(rng.uniform(0, 1) for _ in range(KILLS_OF_A_RUN)):
                asked, had, began = served(ports[0]), journaled(run, KILL_ROWS), time.monotonic()
                process = client(run)
                while journaled(run, KILL_ROWS) < moment * KILL_ROWS and process.is_alive():
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, 0.05))  # between two commits, too
                process.kill()
                delay = time.monotonic() - began
                process.join()
                has = journaled(run, KILL_ROWS)
                if process.exitcode != -signal.SIGKILL or not 0 < has < KILL_ROWS:
                    continue  # before the first row, or after the last: not counted
                redone = served(ports[0]) - asked - (has - had)
                good = good and 0 <= redone <= KILL_WINDOW + KILL_RATE
                of_run.append(
                    {"seed": seed, "delay_s": round(delay, 3), "row": has, "redone": redone}
                )
            same = whole(run) == undisturbed
            good = good and same
            log += of_run
            rows = [entry["row"] for entry in of_run]
            print(
                f"      run {seed}, killed at rows {rows}: {'same' if same else 'DIFFERS'}",
                flush=True,
            )
    most = max((entry["redone"] for entry in log), default=0)
    return {"kills": len(log), "runs": seed + 1, "most_redone": most, "log": log, "rows": KILL_ROWS,
            "rate": KILL_RATE, "passed": good and len(log) >= args.kills}  # fmt: skip


def served(port: int) -> int:
    """Rows a server has answered."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats") as answer:
        return int(json.load(answer)["served"])


def journaled(run: Path, rows: int) -> int:
    """Rows with a response, by the journals."""
    layout = RunLayout(run)
    return sum(
        int((read_journal(layout.partition(i).journal)["kind"] == Kind.RESPONSE).sum())
        for i in range(-(-rows // KILL_PARTITION))
    )


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
