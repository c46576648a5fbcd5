"""Preflight of a server of SmolLM2: embedded, and SGLang itself in chunks of 64 tokens, radix cache on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from datagen.collect.proof import preflight
from datagen.config import collect_config
from datagen.target.checks.subject import QUICK
from datagen.target.checks.suite import NAMES
from datagen.target.checks.verdict import Result
from tests.sglang.conftest import CAPTURE_FLAGS, RealEngine, Target


def results(url: str, folder: Path) -> dict[str, Result]:
    """Every check by its name."""
    config = collect_config(endpoints=url, runs_dir=str(folder), spool_mib=64)
    places = asyncio.run(preflight(config, print, effort=QUICK, names=NAMES))
    for place in places:
        for r in place.results:
            print(f"{place.seconds:5.1f} s  {r.name:14} {r.status:8} {r.measured} {r.fix or ''}")
    return {r.name: r for place in places for r in place.results}


def test_a_healthy_server_is_green(target: Target, tmp_path: Path) -> None:
    found = results(target.url, tmp_path)
    assert {n: r.measured for n, r in found.items() if r.status == "red"} == {}
    assert {n for n, r in found.items() if r.status == "skipped"} == {"thinking", "disk"}
    assert ("self-test passed" in found["boundaries"].measured) is target.is_real
    assert not list(target.spool.glob("*"))


@pytest.mark.slow
def test_a_stock_server_without_the_plugin_is_named(
    real_engine: RealEngine, tmp_path: Path
) -> None:
    server = real_engine.server("stock", *CAPTURE_FLAGS, DATAGEN_CAPTURE_DIR="")
    try:
        server.start()
        found = results(server.url, tmp_path)
    finally:
        server.stop()
    assert {n for n, r in found.items() if r.status == "red"} == {"plugin"}
    assert "pip install --no-deps datagen" in str(found["plugin"].fix)
