"""Reading one sample at random, warm and cold, through four layouts that hold the same samples."""

from __future__ import annotations

import os
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
    """Warm: CPU ms a read, a few dozen reads of each layout in turn. Cold: wall ms a read, nothing of the
    files in the page cache, the layouts' reads one after the other.

    Each read delivers the sample's values, uint16, and sums them. The store also holds the row against
    the journal (its id, its tokens) and every size against the file; Arrow is given the row unvalidated.
    """
    real = np.concatenate(real_samples().rows)
    parts = [real[(i * 11) % (len(real) - TOKENS) :][:TOKENS] for i in range(N)]
    layouts, on_disk = _written(folder, parts)
    for name, read in layouts.items():
        assert np.array_equal(read(7).reshape(-1), parts[7].reshape(-1)), name
    warm, cold = _warm(layouts), _cold(layouts, on_disk)
    raw = sum(p.nbytes for p in parts)
    table = {
        name: {
            "ratio": round(raw / sum(p.stat().st_size for p in on_disk[name]), 3),
            "warm_cpu_ms": round(median(warm[name]), 4),
            "warm_to_store": _ratio(warm[name], warm["store"]),
            "cold_p50_ms": round(median(map(median, cold[name])), 4),
            "cold_to_store": _ratio([*map(median, cold[name])], [*map(median, cold["store"])]),
        }
        for name in layouts
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


def _written(
    folder: Path, parts: list[NDArray[np.uint16]]
) -> tuple[dict[str, Read], dict[str, list[Path]]]:
    """The samples in every layout: how one is read, and the files."""
    import torch

    ids = np.arange(TOKENS, dtype=np.int32)
    spec = StatesSpec((2, 15, 27), "post", "BF16", 576, "plane")
    run = RunReader.open(write_run(folder / "run", spec, ((ids, 8, p) for p in parts), len(parts)))
    (folder / "pt").mkdir()
    for i, part in enumerate(parts):
        (folder / "pt" / f"{i}.pt").write_bytes(pt_bytes(part))
    files = {}
    for name, level in (("raw", None), ("zstd", 1)):
        path = folder / f"{name}.arrow"
        path.write_bytes(arrow(level).encode(parts))
        options = pa.ipc.IpcReadOptions(use_threads=False)
        files[name] = pa.ipc.open_file(pa.memory_map(str(path)), options=options)
    layouts: dict[str, Read] = {
        "store": run.states,
        "pt a sample": lambda i: (
            torch.load(folder / "pt" / f"{i}.pt").view(torch.int16).numpy().view(np.uint16)
        ),
        "arrow zstd 1": lambda i: files["zstd"].get_batch(i).column(0).values.to_numpy(),
        "arrow": lambda i: files["raw"].get_batch(i).column(0).values.to_numpy(),
    }
    return layouts, {
        "store": [*(folder / "run").rglob("states-*.arrow")],
        "pt a sample": [*(folder / "pt").iterdir()],
        "arrow zstd 1": [folder / "zstd.arrow"],
        "arrow": [folder / "raw.arrow"],
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


def _cold(layouts: dict[str, Read], on_disk: dict[str, list[Path]]) -> dict[str, list[list[float]]]:
    """Layout -> wall ms of each read, by round; no sample is read twice in a round."""
    rng = np.random.default_rng(1)
    spent: dict[str, list[list[float]]] = {name: [] for name in layouts}
    for number in range(COLD_ROUNDS):
        for paths in on_disk.values():
            for path in paths:
                forget(path)
        order = rng.permutation(N)[:COLD_READS].tolist()
        times: dict[str, list[float]] = {name: [] for name in layouts}
        for turn, i in enumerate(order):
            for name in list(layouts)[:: 1 if (number + turn) % 2 else -1]:
                started = time.perf_counter()
                layouts[name](i).sum()
                times[name].append((time.perf_counter() - started) * 1e3)
        for name, each in times.items():
            spent[name].append(each)
    return spent


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
