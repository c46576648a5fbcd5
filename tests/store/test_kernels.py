"""The compiled loops against their definitions in numpy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datagen.store import kernels

shapes = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 40))


def drawn(seed: int, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, 65536, shape, dtype=np.uint16)


@settings(deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000), data=st.data())
def test_split_is_what_it_says_and_join_undoes_it(
    shape: tuple[int, int, int], seed: int, data: st.DataObject
) -> None:
    n, layers, hidden = shape
    rows, bias = drawn(seed, n, layers * hidden), drawn(seed, layers * hidden).astype(np.uint8)
    first = data.draw(st.integers(0, layers - 1))
    last = data.draw(st.integers(first + 1, layers))
    columns = slice(first * hidden, last * hidden)
    exponents = np.empty((n, (last - first) * hidden), dtype=np.uint8)
    sm = np.full((n, layers * hidden), 77, dtype=np.uint8)
    kernels.split(rows, columns.start, bias, exponents, sm)
    chosen = rows[:, columns]
    assert np.array_equal(exponents, (chosen >> 7).astype(np.uint8) - bias[columns])
    assert np.array_equal(sm[:, columns], (chosen << 1).astype(np.uint8) | (chosen >> 15))
    others = np.delete(sm, np.arange(columns.start, columns.stop), axis=1)
    assert (others == 77).all()
    back = np.full((n, layers * hidden), 7, dtype=np.uint16)
    for frozen in (exponents, sm, bias):
        frozen.flags.writeable = False  # as what is read from a file
    inner = data.draw(st.integers(0, last - first - 1)) * hidden
    width = len(exponents[0]) - inner
    kernels.join(exponents, inner, sm, columns.start + inner, bias, back, 0, width)
    assert np.array_equal(back[:, :width], chosen[:, inner:])
    assert (back[:, width:] == 7).all()


@settings(deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_extremes_are_the_largest_and_the_smallest_magnitude(
    shape: tuple[int, int, int], seed: int
) -> None:
    bits = drawn(seed, *shape)
    high, low = np.empty((2, *shape[:2]), dtype=np.uint16)
    kernels.extremes(bits, high, low)
    assert np.array_equal(high, (bits & 0x7FFF).max(axis=2))
    assert np.array_equal(low, (bits & 0x7FFF).min(axis=2))


def test_another_layout_or_dtype_is_refused() -> None:
    high, low = np.empty((2, 4, 2), dtype=np.uint16)
    for bits in (drawn(0, 4, 2, 8)[:, :, ::2], drawn(0, 4, 2, 4).astype(np.int16)):
        with pytest.raises(TypeError):
            kernels.extremes(bits, high, low)


def test_other_threads_go_on_meanwhile() -> None:
    bits = drawn(0, 512, 4, 7168)
    high, low = np.empty((2, 512, 4), dtype=np.uint16)
    inside, seen = threading.Event(), []

    def look() -> None:
        inside.set()
        for _ in range(40):
            kernels.extremes(bits, high, low)
        inside.clear()

    thread = threading.Thread(target=look)
    thread.start()
    inside.wait()
    while inside.is_set():
        seen.append(time.perf_counter())
    thread.join()
    assert len(seen) > 1000  # a lock held throughout would let about 40 in, one a call


def test_where_nothing_can_be_kept_it_is_compiled_each_time(tmp_path: Path) -> None:
    source = tmp_path / "kernels.py"
    shutil.copy(kernels.__file__, source)
    (tmp_path / "__pycache__").write_text("no directory")
    code = (
        "import kernels, numpy as np; a = np.ones((1, 1, 3), 'u2'); h = np.empty((2, 1, 1), 'u2')\n"
    )
    code += "kernels.extremes(a, *h); print(kernels.__file__, h.ravel().tolist())"
    nowhere = {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=os.environ | nowhere, check=True,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == f"{source} [1, 1]"
