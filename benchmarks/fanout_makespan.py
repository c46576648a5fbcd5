"""Wall time of a run over several servers against tokens / capacity; a part of benchmarks/fanout.py."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import threading
import time

from benchmarks.fanout_bench import ANSWER_TOKENS, Bench, Result, answer, finish

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
