"""Reading one sample at random, warm and cold, through four layouts that hold the same samples."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from store_codecs import arrow, pt_bytes
from store_run import write_run
from store_states import real_samples

from datagen.store.run_reader import RunReader
from datagen.store.states import StatesSpec

N, TOKENS = 2000, 48
WARM_ROUNDS, WARM_READS = 60, 40
COLD_ROUNDS, COLD_READS = 6, 120
Read = Callable[[int], NDArray[np.uint16]]


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    """Warm: CPU ms a read, a few dozen reads of each layout in turn. Cold: wall ms a read, the layouts' reads
    one after the other, nothing of the files in the page cache: they are closed, forgotten and opened again
    (what is mapped cannot be forgotten), and the bytes that the disk gave, a read, say that it was asked. A
    major fault is a page waited for; what was asked for beforehand, as `read` and advice do, has none.

    Each read delivers the sample's values, uint16, and sums them. The store also holds the row against
    the journal (its id, its tokens) and every size against the file; Arrow is given the row unvalidated.
    """
    real = np.concatenate(real_samples().rows)
    parts = [real[(i * 11) % (len(real) - TOKENS) :][:TOKENS] for i in range(N)]
    on_disk = _written(folder, parts)
    layouts = _opened(folder)
    for name, read in layouts.items():
        assert np.array_equal(read(7).reshape(-1), parts[7].reshape(-1)), name
    warm = _warm(layouts)
    del layouts, read
    cold, faults, from_disk = _cold(folder, on_disk)
    raw = sum(p.nbytes for p in parts)
    table = {
        name: {
            "ratio": round(raw / sum(p.stat().st_size for p in on_disk[name]), 3),
            "warm_cpu_ms": round(median(warm[name]), 4),
            "warm_to_store": _ratio(warm[name], warm["store"]),
            "cold_p50_ms": round(median(map(median, cold[name])), 4),
            "cold_to_store": _ratio([*map(median, cold[name])], [*map(median, cold["store"])]),
            "cold_major_faults": faults[name],
            "cold_disk_bytes": from_disk[name],
        }
        for name in on_disk
    }
    bars = {
        f"{state} no slower than {short}": table[name][f"{state}_to_store"] >= 1
        for state in ("warm", "cold")
        for name, short in (("pt a sample", "pt"), ("arrow zstd 1", "arrow zstd"))
    }
    bars["a third less disk than raw"] = table["store"]["ratio"] >= 1.47
    return {"samples": N, "bytes_a_sample": parts[0].nbytes, "layouts": table}, bars


def _ratio(others: list[float], ours: list[float]) -> float:
    """Of two layouts' times taken side by side: the median of the rounds' ratios."""
    return round(median(a / b for a, b in zip(others, ours, strict=True)), 3)


def _written(folder: Path, parts: list[NDArray[np.uint16]]) -> dict[str, list[Path]]:
    """The samples in every layout; returns the files."""
    ids = np.arange(TOKENS, dtype=np.int32)
    spec = StatesSpec((2, 15, 27), "post", "BF16", 576, "plane")
    write_run(folder / "run", spec, ((ids, 8, p) for p in parts), len(parts))
    (folder / "pt").mkdir()
    for i, part in enumerate(parts):
        (folder / "pt" / f"{i}.pt").write_bytes(pt_bytes(part))
    for name, level in (("raw", None), ("zstd", 1)):
        (folder / f"{name}.arrow").write_bytes(arrow(level).encode(parts))
    return {
        "store": [*(folder / "run").rglob("states-*.arrow")],
        "pt a sample": [*(folder / "pt").iterdir()],
        "arrow zstd 1": [folder / "zstd.arrow"],
        "arrow": [folder / "raw.arrow"],
    }


def _opened(folder: Path) -> dict[str, Read]:
    """How a sample of each layout is read, its files opened anew."""
    import torch

    run = RunReader.open(folder / "run" / "manifest.json")
    options = pa.ipc.IpcReadOptions(use_threads=False)
    zstd, raw = (
        pa.ipc.open_file(pa.memory_map(str(folder / f"{name}.arrow")), options=options)
        for name in ("zstd", "raw")
    )
    return {
        "store": run.states,
        "pt a sample": lambda i: (
            torch.load(folder / "pt" / f"{i}.pt").view(torch.int16).numpy().view(np.uint16)
        ),
        "arrow zstd 1": lambda i: zstd.get_batch(i).column(0).values.to_numpy(),
        "arrow": lambda i: raw.get_batch(i).column(0).values.to_numpy(),
    }


def _warm(layouts: dict[str, Read]) -> dict[str, list[float]]:
    """Layout -> CPU ms a read, by round."""
    rng = np.random.default_rng(0)
    for read in layouts.values():  # what is set up once, and the page cache
        for i in range(N):
            read(i)
    spent: dict[str, list[float]] = {name: [] for name in layouts}
    for number in range(WARM_ROUNDS):
        for name in list(layouts)[:: 1 if number % 2 else -1]:
            read, order = layouts[name], rng.integers(0, N, WARM_READS).tolist()
            started = time.process_time()
            for i in order:
                read(i).sum()
            spent[name].append((time.process_time() - started) / WARM_READS * 1e3)
    return spent


def _cold(
    folder: Path, on_disk: dict[str, list[Path]]
) -> tuple[dict[str, list[list[float]]], dict[str, float], dict[str, int]]:
    """Layout -> wall ms of each read, by round; major faults a read; bytes from the disk a read.

    No sample twice in a round.
    """
    rng = np.random.default_rng(1)
    spent: dict[str, list[list[float]]] = {name: [] for name in on_disk}
    faults, from_disk = dict.fromkeys(on_disk, 0), dict.fromkeys(on_disk, 0)
    for number in range(COLD_ROUNDS):
        for path in itertools.chain(*on_disk.values()):
            forget(path)
        layouts = _opened(folder)
        first, *order = rng.permutation(N)[: COLD_READS + 1].tolist()
        for read in layouts.values():  # what a file needs once
            read(first)
        times: dict[str, list[float]] = {name: [] for name in layouts}
        for turn, i in enumerate(order):
            for name in list(layouts)[:: 1 if (number + turn) % 2 else -1]:
                before, disk = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, disk_bytes()
                started = time.perf_counter()
                layouts[name](i).sum()
                times[name].append((time.perf_counter() - started) * 1e3)
                faults[name] += resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
                from_disk[name] += disk_bytes() - disk
        for name, each in times.items():
            spent[name].append(each)
        del layouts, read  # nothing stays mapped
    reads = COLD_ROUNDS * COLD_READS
    return (
        spent,
        {name: round(n / reads, 2) for name, n in faults.items()},
        {name: round(n / reads) for name, n in from_disk.items()},
    )


def disk_bytes() -> int:
    """What this process has had read from disks, reading ahead included."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"])


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
