"""A client killed again and again loses and doubles nothing; a part of benchmarks/fanout.py."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import time
import urllib.request
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.fanout_bench import Bench, Result
from benchmarks.fanout_client import forked
from datagen.store.journal import Kind, read_journal
from datagen.store.layout import RunLayout
from datagen.store.responses import ResponsesReader

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.fanout_client"])


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
