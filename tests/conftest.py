"""Every test runs with its own Prefect home, and sends nothing anywhere."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.skips", "tests.scopes"]

# Before anything imports prefect, which reads its settings once.
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
home = Path(tempfile.gettempdir()) / f"datagen-tests-{os.getuid()}{worker}"
os.environ["PREFECT_HOME"] = str(home)
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import datagen.store.kernels  # noqa: E402, F401 - compiled before anything is timed

# A busy machine is no failure: neither an example that took long nor one that was long in the making.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
