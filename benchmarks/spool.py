"""What handing a capture over costs: CPU seconds a GB of rows, by what becomes of the files that were read.

    python benchmarks/spool.py [--spool DIR] [--tokens 300,900] [--gb 4] [--pairs 6]

Captures of Kimi's width are written by the plugin's own `write_spool`, mapped and summed by `read_spool`, and
then unlinked, or handed back as spares (`capture/spares.py`), one after the other in one thread. Passes
alternate, and the ratios are of neighbours. `copied` is the physical limit beside it: the same bytes written
over one file that is never given back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import mount_of  # noqa: E402
from datagen.capture.spares import drop, hand_back  # noqa: E402
from datagen.capture.spool import (  # noqa: E402
    default_spool,
    discard,
    read_spool,
    spool_path,
    write_spool,
)

WIDTH, HIDDEN = 28672, 7168


def cpu_s() -> float:
    """Of this process, in user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def passed(
    spool: Path, lengths: list[int], rows: memoryview, done: Callable[[Path], None]
) -> dict[str, float]:
    """CPU seconds a GB of writing, reading and giving back captures of so many tokens."""
    spent = dict.fromkeys(("write", "read", "give_back"), 0.0)
    metadata = {"boundaries": "2,30,58", "hidden": str(HIDDEN), "final_norm": "post", "server": ""}
    for i, n in enumerate(lengths):
        path, start = spool_path(spool, str(i)), cpu_s()
        write_spool(
            path, rows=[rows[: n * WIDTH * 2]], n_tokens=n, width=WIDTH, dtype="BF16",
            input_ids=bytes(4 * n), metadata={"rid": str(i), **metadata},
        )  # fmt: skip
        written = cpu_s()
        found = read_spool(path)
        read = cpu_s()
        del found
        done(path)
        for name, seconds in zip(
            spent, (written - start, read - written, cpu_s() - read), strict=True
        ):
            spent[name] += seconds
    drop(spool)
    gb = sum(lengths) * WIDTH * 2 / 1e9
    return {k: v / gb for k, v in spent.items()} | {"all": sum(spent.values()) / gb}


def copied(spool: Path, lengths: list[int], rows: memoryview) -> float:
    """CPU seconds a GB of writing the same bytes over one file, and nothing else."""
    with open(spool / "one", "wb", buffering=0) as file:
        file.write(rows)
        start = cpu_s()
        for n in lengths:
            file.seek(0)
            file.write(rows[: n * WIDTH * 2])
        spent = cpu_s() - start
    return spent / sum(lengths) / WIDTH / 2 * 1e9


def main() -> None:
    """Parse, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spool", type=Path, default=default_spool(0))
    parser.add_argument("--tokens", default="300,900", help="shortest,longest capture")
    parser.add_argument("--gb", type=float, default=4, help="of rows in a pass")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    low, high = map(int, args.tokens.split(","))
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) * WIDTH * 2 < args.gb * 1e9:
        lengths.append(draw.randint(low, high))
    rows = memoryview(np.random.default_rng(0).bytes(high * WIDTH * 2))
    args.spool.mkdir(mode=0o700)
    try:
        mount = mount_of(args.spool)
        ways: dict[str, Callable[[Path], None]] = {"unlinked": discard, "handed_back": hand_back}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        limits = []
        for pair in range(args.pairs):
            for name in sorted(ways, reverse=bool(pair % 2)):
                found[name].append(passed(args.spool, lengths, rows, ways[name]))
            limits.append(copied(args.spool, lengths, rows))
    finally:
        shutil.rmtree(args.spool)
    medians: dict[str, Any] = {
        name: {k: round(statistics.median(p[k] for p in passes), 3) for k in passes[0]}
        for name, passes in found.items()
    }
    result = {
        "cpu_s_per_gb": medians | {"copied": round(statistics.median(limits), 3)},
        "handed_back_over_unlinked": [
            round(new["all"] / old["all"], 3)
            for old, new in zip(found["unlinked"], found["handed_back"], strict=True)
        ],
        "mount": mount, "tokens": args.tokens, "gb": args.gb, "cpus": os.cpu_count(),
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    args.out.mkdir(parents=True, exist_ok=True)
    kind = "spool-huge" if "huge=" in mount else "spool"
    path = args.out / f"{kind}-{date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
