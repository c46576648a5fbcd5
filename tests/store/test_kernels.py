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
    low = data.draw(st.integers(0, n - 1))
    high = data.draw(st.integers(low + 1, n))
    first = data.draw(st.integers(0, layers - 1)) * hidden
    last = data.draw(st.integers(first + 1, layers * hidden))
    width = last - first
    exponents = np.full(width * (high - low) + 3, 55, dtype=np.uint8)
    sm = np.full(rows.shape, 77, dtype=np.uint8)
    kernels.split(rows, low, high, first, last, bias, exponents, sm)
    chosen = rows[low:high, first:last]
    wanted = (chosen >> 7).astype(np.uint8) - bias[first:last]
    assert exponents.tolist() == [*wanted.ravel().tolist(), 55, 55, 55]
    assert np.array_equal(sm[low:high, first:last], (chosen << 1).astype(np.uint8) | (chosen >> 15))
    sm[low:high, first:last] = 77
    assert (sm == 77).all()
    kernels.split(rows, low, high, first, last, bias, exponents, sm)
    for frozen in (exponents, sm, bias):
        frozen.flags.writeable = False  # as what is read from a file
    back = np.full(rows.shape, 7, dtype=np.uint16)
    inner = data.draw(st.integers(0, width - 1))
    kernels.join(
        exponents, inner, width, 0, high - low, sm, low, first + inner, bias, back, 0, width - inner
    )
    assert np.array_equal(back[: high - low, : width - inner], chosen[:, inner:])
    back[: high - low, : width - inner] = 7
    assert (back == 7).all()


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


@settings(deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_squares_are_those_of_the_values(shape: tuple[int, int, int], seed: int) -> None:
    bits = drawn(seed, *shape)
    sums = np.empty(shape[:2])
    kernels.squares(bits, sums)
    with np.errstate(invalid="ignore"):  # NaN among them
        values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        np.testing.assert_allclose(sums, np.square(values).sum(axis=2), rtol=1e-12)


def test_another_layout_or_dtype_is_refused() -> None:
    high, low = np.empty((2, 4, 2), dtype=np.uint16)
    for bits in (drawn(0, 4, 2, 8)[:, :, ::2], drawn(0, 4, 2, 4).astype(np.int16)):
        with pytest.raises(TypeError):
            kernels.extremes(bits, high, low)


def test_other_threads_go_on_meanwhile() -> None:
    bits = drawn(0, 512, 4, 7168)
    high, low = np.empty((2, 512, 4), dtype=np.uint16)
    calls: list[tuple[float, float]] = []

    def look() -> None:
        for _ in range(40):
            began = time.perf_counter()
            kernels.extremes(bits, high, low)
            calls.append((began, time.perf_counter()))

    thread, seen = threading.Thread(target=look), []
    thread.start()
    while thread.is_alive():
        seen.append(time.perf_counter())
    thread.join()
    ticks = np.array(seen)
    within = [int(((ticks > began) & (ticks < ended)).sum()) for began, ended in calls]
    assert sum(n > 10 for n in within) > 10, (
        within
    )  # a lock held would let none in before a call ends


def test_no_loop_holds_the_interpreter() -> None:
    loops = [k for k in vars(kernels).values() if hasattr(k, "targetoptions")]
    assert len(loops) == 6
    assert all(loop.targetoptions["nogil"] for loop in loops)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [0, 100])
def test_a_damaged_cache_costs_time_and_nothing_else(
    tmp_path: Path, suffix: str, damage: int
) -> None:
    used = cached_in(tmp_path / "cache")
    files = [*(tmp_path / "cache").rglob(f"*{suffix}")]
    assert len(files) >= 5, used
    for file in files:
        file.write_bytes(file.read_bytes()[:damage])
    assert cached_in(tmp_path / "cache") == used


def test_a_cache_that_cannot_grow_costs_time_and_nothing_else(tmp_path: Path) -> None:
    assert cached_in(tmp_path / "cache", "ulimit -f 1; ") == "[1, 1]"


def test_without_compiled_code_one_line_says_why() -> None:
    code = "from datagen.errors import ConfigError\ntry:\n import datagen.store.kernels\n"
    code += "except ConfigError as e: print(e.what)"
    done = run_python(code, {"NUMBA_DISABLE_JIT": "1"})
    assert "NUMBA_DISABLE_JIT is set" in done


CODE = (
    "import numpy as np; from datagen.store import kernels; a = np.ones((1, 1, 3), 'u2');"
    "h = np.empty((2, 1, 1), 'u2'); kernels.extremes(a, *h); print(h.ravel().tolist())"
)


def cached_in(folder: Path, before: str = "") -> str:
    """What a process prints that uses a loop, with its cache in `folder`."""
    folder.mkdir(exist_ok=True)
    return run_python(CODE, {"NUMBA_CACHE_DIR": str(folder)}, before)


def run_python(code: str, environment: dict[str, str], before: str = "") -> str:
    done = subprocess.run(
        ["bash", "-c", f'{before}exec "$0" -c "$1"', sys.executable, code],
        env=os.environ | environment, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


def test_where_nothing_can_be_kept_it_is_compiled_each_time(tmp_path: Path) -> None:
    source = tmp_path / "kernels.py"
    shutil.copy(kernels.__file__, source)
    (tmp_path / "__pycache__").write_text("no directory")
    code = (
        "import kernels, numpy as np; a = np.ones((1, 1, 3), 'u2'); h = np.empty((2, 1, 1), 'u2')\n"
    )
    code += "kernels.extremes(a, *h); print(kernels.__file__, h.ravel().tolist())"
    nowhere = {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull, "PYTHONPATH": str(tmp_path)}
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | nowhere
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, check=True,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == f"{source} [1, 1]"
