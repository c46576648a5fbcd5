"""What a second thread, and more of them, gain at encoding and at decoding, beside plain zstd's.

zstd over the same samples, a call of C a sample that holds the interpreter for nothing, says what the
machine gives: two virtual cores may be one real one, neighbours take their share, and no Python gains more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
Rows = NDArray[np.uint16]


def measure() -> tuple[dict[str, Any], dict[str, bool]]:
    """Figures and bars, for real states and for Kimi's width."""
    real = real_samples()
    found = {"smollm2": _scaling(real, 576), "kimi width": _scaling(_wide(real), 7168)}
    encode = found["smollm2"]["encode"]
    return {
        "two_thread_scaling": encode["plane"]["2"]["gain"],
        "two_thread_scaling_of_plain_zstd": encode["zstd"]["2"]["gain"],
        "two_thread_scaling_of_the_limit": encode["of the limit"]["2"],
        "samples": found,
    }, {
        f"{name}: two threads {what}": met
        for name, ways in found.items()
        for what, met in (
            (">= 1.8 of one", ways["encode"]["plane"]["2"]["gain"] >= 1.8),
            ("gain >= 0.95 of what plain zstd gains", ways["encode"]["of the limit"]["2"] >= 0.95),
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
    """Work -> threads -> MB of raw states a second of wall time, its gain over one; our gain over C's."""
    counts = [c for c in COUNTS if c <= len(os.sched_getaffinity(0))]
    raw = sum(r.nbytes for r in rows)
    rates: dict[str, dict[int, list[float]]] = {name: {c: [] for c in counts} for name in works}
    for number in range(ROUNDS):
        for name in list(works)[:: 1 if number % 2 else -1]:
            work, items = works[name]
            for count in counts[:: 1 if number % 2 else -1]:
                with ThreadPoolExecutor(count) as pool:
                    list(pool.map(work, items[:count]))  # what is made once a thread
                    started = time.perf_counter()
                    for done in [pool.submit(work, item) for item in items]:
                        done.result()
                    rates[name][count].append(raw / (time.perf_counter() - started) / 1e6)
    gains = {
        name: {
            c: [many / one for one, many in zip(r[1], r[c], strict=True)] for c in counts
        }
        for name, r in rates.items()
    }  # fmt: skip
    return {
        **{
            name: {
                str(c): {
                    "mb_per_s": round(median(rates[name][c])), "gain": round(median(gains[name][c]), 3)
                }
                for c in counts
            }
            for name in works
        },
        "of the limit": {
            str(c): round(
                median(a / b for a, b in zip(gains["plane"][c], gains["zstd"][c], strict=True)), 3
            )
            for c in counts
        },
    }  # fmt: skip
