"""Processes that are killed, forked from one that has imported what they run."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.store.faults", "benchmarks.fanout_client"]
)  # one for all tests
