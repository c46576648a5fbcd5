"""The cache of expensive steps: results named by the content they were made from, never by a path.

Entries are whole or absent, may be deleted at any time, and are made again when they cannot be
read. Default place: $DATAGEN_CACHE, else $XDG_CACHE_HOME/datagen, else ~/.cache/datagen.
"""

from __future__ import annotations

import hashlib
import io
import os
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datagen.prompts.identity import canonical_json
from datagen.store.atomic import storage_errors


def default_cache() -> Path:
    """Where the prompt stage keeps its cache unless told otherwise."""
    if own := os.environ.get("DATAGEN_CACHE"):
        return Path(own) / "prompts"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "datagen" / "prompts"


def cache_key(*parts: Any) -> str:
    """A name for a result, from everything that decides it; `parts` are plain JSON values."""
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:32]


def write_cached(path: Path, content: Any) -> None:
    """Write an entry whole, by rename; `content` is any buffer. Raises StorageFull.

    Not synced to disk: an entry that a crash leaves torn is found out when read, and made again.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as f:
                f.write(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def save_arrays(path: Path, **arrays: npt.NDArray[Any]) -> None:
    """Write named arrays as one entry."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_cached(path, buffer.getbuffer())


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]] | None:
    """The arrays of an entry, or None when there is none that can be read."""
    try:
        with np.load(path, allow_pickle=False) as entry:
            return {name: entry[name] for name in entry.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError):
        return None
