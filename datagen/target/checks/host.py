"""Checks of this machine: room for the run, file descriptors."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from datagen.target.checks.verdict import Finding, Skipped, ok, red

SPARE_FILES = 128


def check_disk(path: Path, needed_bytes: int | None) -> Finding:
    """Room where the run is written for what the plan still gives. `needed_bytes`: None without a plan."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed_bytes is None:
        raise Skipped(f"no plan so far; {free / 1e9:.1f} GB are free at {place}")
    measured = f"{_size(free)} free at {place}"
    expected = f"{_size(needed_bytes)} for the plan's states"
    if free >= needed_bytes:
        return ok(measured, expected)
    return red(
        f"{measured}, {expected} needed",
        expected,
        "make room, choose another --runs-dir, or take fewer prompts with --limit",
    )


def check_files(needed: int) -> Finding:
    """Descriptors for every request in flight and every open partition."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = f"{needed + SPARE_FILES:,} or more"
    if soft >= needed + SPARE_FILES or soft == resource.RLIM_INFINITY:
        return ok(f"{soft:,}", expected)
    return red(
        f"only {soft:,} files may be open",
        expected,
        f"raise the limit before the run: ulimit -n {min(max(needed + SPARE_FILES, 65536), hard)}",
    )


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.2f} MB"
