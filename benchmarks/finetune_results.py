"""The day's file of results: parts that run side by side write into the same one."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from datagen.store.atomic import write_atomic

NUMBERS = re.compile(r"\[\n[^\[\]{}\"]*\]")  # a list of nothing but numbers, over several lines


def add_result(path: Path, name: str, result: dict[str, Any]) -> None:
    """Put `result` under `name` in the JSON object at `path`, whose other names stay.

    Processes that do so at once wait for each other, and a reader sees a whole file.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # freed with the process, however it ends
        earlier = json.loads(path.read_text()) if path.exists() else {}
        text = json.dumps({**earlier, name: result}, indent=2)
        text = NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
        write_atomic(path, text.encode() + b"\n")
    finally:
        os.close(folder)
