"""What a second thread, and more of them, gain at encoding and at decoding, beside as many processes.

Processes share neither an interpreter nor a memory map, so what they gain is what the machine gives: two
virtual cores may be one real one, neighbours take their share, and memory has a bandwidth. Plain zstd, a
call of C a sample over the same samples, is measured on threads as well.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from store_states import Samples, real_samples, wide_samples

from datagen.store.codecs import Encoded, codec_named
from datagen.store.encoder import Encoder
from datagen.store.states import StatesSpec

ROUNDS = 10
RAW_BYTES = 100 << 20  # a round, at least
COUNTS = (1, 2, 4, 8)
LONGEST_S = 300  # of one measurement
Rows = NDArray[np.uint16]


def measure() -> tuple[dict[str, Any], dict[str, bool]]:
    """Figures and bars, for real states and for Kimi's width."""
    real = real_samples()
    found = {"smollm2": _scaling(real, 576), "kimi width": _scaling(_wide(real), 7168)}
    encode = found["smollm2"]["encode"]
    return {
        "two_thread_scaling": encode["plane"]["2"]["gain"],
        "two_process_scaling": encode["plane, processes"]["2"]["gain"],
        "two_thread_scaling_of_plain_zstd": encode["zstd"]["2"]["gain"],
        "two_threads_to_two_processes": encode["threads to processes"]["2"],
        "samples": found,
    }, {
        f"{name}: two threads {what}": met
        for name, ways in found.items()
        for what, met in (
            (">= 1.8 of one", ways["encode"]["plane"]["2"]["gain"] >= 1.8),
            ("as fast as two processes, 0.95", ways["encode"]["threads to processes"]["2"] >= 0.95),
        )
    }


def _wide(real: Samples) -> Samples:
    return wide_samples(real, n=4, tokens=600)


def _scaling(samples: Samples, hidden: int) -> dict[str, Any]:
    spec = StatesSpec((2, 15, 27), "post", "BF16", hidden, "plane")
    encoder = Encoder(spec)
    rows = samples.rows * -(-RAW_BYTES // sum(r.nbytes for r in samples.rows))
    encoder(max(rows, key=len))
    codec = codec_named(spec.codec)
    held = threading.local()

    def deflated(each: Rows) -> bytes:
        if not hasattr(held, "deflate"):
            held.deflate = zstandard.ZstdCompressor(level=1)
        return held.deflate.compress(each)

    def inflated(frame: bytes) -> bytes:
        if not hasattr(held, "inflate"):
            held.inflate = zstandard.ZstdDecompressor()
        return held.inflate.decompress(frame)

    def decoded(encoded: Encoded) -> Rows:
        return codec.decode(
            encoded.exp, encoded.sm, *encoded.shape, hidden, encoded.params, slice(None),
            range(spec.n_layers),
        )  # fmt: skip

    return {
        "encode": _gains({"plane": (encoder, rows), "zstd": (deflated, rows)}, rows),
        "decode": _gains(
            {"plane": (decoded, [*map(encoder, rows)]), "zstd": (inflated, [*map(deflated, rows)])},
            rows,
        ),
    }


def _gains(
    works: dict[str, tuple[Callable[[Any], object], list[Any]]], rows: list[Rows]
) -> dict[str, Any]:
    """Way -> workers -> MB of raw states a second of wall time, its gain over one."""
    counts = [c for c in COUNTS if c <= len(os.sched_getaffinity(0))]
    raw = sum(r.nbytes for r in rows)
    ways = {name: (_threads, *work) for name, work in works.items()}
    ways["plane, processes"] = (_processes, *works["plane"])
    rates: dict[str, dict[int, list[float]]] = {name: {c: [] for c in counts} for name in ways}
    for number in range(ROUNDS):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            run, work, items = ways[name]
            for count in counts[:: 1 if number % 2 else -1]:
                seconds = run(work, [items[i::count] for i in range(count)])
                rates[name][count].append(raw / seconds / 1e6)
    return {
        **{
            name: {
                str(c): {
                    "mb_per_s": round(median(found[c])),
                    "gain": round(
                        median(b / a for a, b in zip(found[1], found[c], strict=True)), 3
                    ),
                }
                for c in counts
            }
            for name, found in rates.items()
        },
        "threads to processes": {
            str(c): round(
                median(
                    a / b
                    for a, b in zip(rates["plane"][c], rates["plane, processes"][c], strict=True)
                ),
                3,
            )
            for c in counts
        },
    }


def _threads(work: Callable[[Any], object], shares: Sequence[list[Any]]) -> float:
    """Seconds that a thread a share takes, all at once; what is made once a thread is made before."""
    ready, done = (threading.Barrier(len(shares) + 1, timeout=LONGEST_S) for _ in range(2))
    threads = [
        threading.Thread(target=_worked, args=(work, share, ready, done)) for share in shares
    ]
    return _timed(threads, ready, done)


def _processes(work: Callable[[Any], object], shares: Sequence[list[Any]]) -> float:
    """The same with a process a share."""
    context = multiprocessing.get_context("fork")
    ready, done = (context.Barrier(len(shares) + 1, timeout=LONGEST_S) for _ in range(2))
    processes = [
        context.Process(target=_worked, args=(work, share, ready, done)) for share in shares
    ]
    return _timed(processes, ready, done)


def _worked(
    work: Callable[[Any], object],
    share: list[Any],
    ready: threading.Barrier,
    done: threading.Barrier,
) -> None:
    try:
        for item in share[:2]:
            work(item)
        ready.wait()
        for item in share:
            work(item)
        done.wait()
    except BaseException:  # the others would wait for this one
        ready.abort()
        done.abort()
        raise


def _timed(workers: Sequence[Any], ready: threading.Barrier, done: threading.Barrier) -> float:
    """Raises BrokenBarrierError when a worker fails, or is gone for LONGEST_S."""
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.perf_counter()
    done.wait()
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return seconds
