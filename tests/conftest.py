"""Every test runs with its own Prefect home, and sends nothing anywhere."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

pytest_plugins = ["tests.skips"]

# Before anything imports prefect, which reads its settings once.
os.environ["PREFECT_HOME"] = str(Path(tempfile.gettempdir()) / f"datagen-tests-{os.getuid()}")
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
