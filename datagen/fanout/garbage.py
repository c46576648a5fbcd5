"""The cyclic garbage collector while thousands of rows are in flight: seldom, and not over what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Objects made since the last collection before the next. The usual 700 are those of seven rows."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Leave out of every collection what exists now, and collect a seventieth as often.

    A row makes no cycles, so collections find nothing: they traced the same living rows over and over,
    a fifth of the client's CPU at 1,024 in flight. Cycles that libraries make are still found.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
