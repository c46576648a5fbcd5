"""Seconds that preflight takes on the embedded target: as a run starts with it, and in full.

    python -m benchmarks.preflight [--repeats 3]

Wall seconds of the checks alone, the CPU seconds of the server and of the checks, and the load of the
machine, which decides between them. Writes benchmarks/results/preflight-<date>.json.
"""

from __future__ import annotations

import os  # isort: skip

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does
import argparse
import asyncio
import datetime as dt
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from datagen.collect.proof import preflight
from datagen.config import collect_config
from datagen.target.checks.subject import FULL, QUICK
from datagen.target.checks.suite import NAMES
from tests.tiny import serving

RESULTS = Path(__file__).with_name("results")


def cpu_s(process: psutil.Process) -> float:
    """User and system seconds so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(url: str, folder: Path, name: str, repeats: int) -> dict[str, Any]:
    """Medians of one effort."""
    config = collect_config(endpoints=url, runs_dir=str(folder))
    server = next(p for p in psutil.process_iter(["cmdline"]) if _serves(p, url))
    rows = []
    for _ in range(repeats):
        began, here, there = time.monotonic(), time.process_time(), cpu_s(server)
        places = asyncio.run(
            preflight(config, print, effort=QUICK if name == "quick" else FULL, names=NAMES)
        )
        assert not [r for p in places for r in p.reds()]
        rows.append(
            {
                "checks_s": places[0].seconds,
                "with_tokenizer_s": time.monotonic() - began,
                "client_cpu_s": time.process_time() - here,
                "server_cpu_s": cpu_s(server) - there,
            }
        )
    return {key: round(statistics.median(r[key] for r in rows), 2) for key in rows[0]}


def _serves(process: psutil.Process, url: str) -> bool:
    words = process.info["cmdline"] or []
    return "datagen.cli" in words and url.rsplit(":", 1)[-1] in words


def main() -> None:
    """Measure both, print, and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving("smollm2", folder, dtype="bfloat16", threads=0) as target:
            load = os.getloadavg()[0]
            record = {
                "what": "preflight on the embedded SmolLM2, medians",
                "cpus": os.cpu_count(),
                "load_before": round(load, 1),
                "repeats": repeats,
                **{n: measure(target.url, folder, n, repeats) for n in ("quick", "full")},
                "load_after": round(os.getloadavg()[0], 1),
            }
    text = json.dumps(record, indent=2)
    print(text)
    (RESULTS / f"preflight-{dt.date.today():%Y-%m-%d}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
