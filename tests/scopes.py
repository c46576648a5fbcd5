"""A pytest plugin for `pytest -n`: the tests that share a server run in one process, the others by file."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Rooms whose session fixtures start a Prefect server, or a model's.
SHARED = ("tests/flows/", "tests/sglang/")


class ByServer(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((room for room in SHARED if file.startswith(room)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer:
    return ByServer(config, log)
