"""Datasets of the Hugging Face hub, streamed: nothing is downloaded that is not read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datagen.errors import PromptDataError
from datagen.prompts.cache import cache_key
from datagen.prompts.mix import Source, file_sha256

LOCAL = "local-"
DENIED = ("gated", "restricted", "authenticated", "401", "403")
COMMIT = re.compile("[0-9a-f]{40}")


def hub_revision(source: Source) -> str:
    """The commit that a dataset source stands for: the pinned one, else the hub's newest.

    A local directory stands for its content. Raises PromptDataError when the hub cannot be asked.
    """
    assert source.dataset is not None
    folder = Path(source.dataset)
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return LOCAL + cache_key([[str(f.relative_to(folder)), file_sha256(f)] for f in files])
    if source.revision is not None and COMMIT.fullmatch(source.revision):
        return source.revision
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(source.dataset, revision=source.revision).sha)
    except _reading_errors() as e:
        raise _hub_error(source, e) from e


def hub_chunks(
    source: Source, revision: str, chunk_rows: int, skip_rows: int = 0
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a dataset source after the first `skip_rows`, in the dataset's order, in chunks.

    Raises PromptDataError.
    """
    from datasets import load_dataset

    assert source.dataset is not None
    try:
        stream = load_dataset(
            source.dataset,
            name=source.subset,
            split=source.split,
            streaming=True,
            revision=None if revision.startswith(LOCAL) else revision,
        )
        chunk: list[dict[str, Any]] = []
        for row in stream.skip(skip_rows):
            chunk.append(row)
            if len(chunk) == chunk_rows:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
    except _reading_errors() as e:
        raise _hub_error(source, e) from e


def _reading_errors() -> tuple[type[Exception], ...]:
    """What the hub's client and `datasets` raise when they get no answer, or a bad one.

    The HTTP library beneath it has changed before: its base error is taken from the client's own.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    of_library = [c for c in HfHubHTTPError.__mro__ if issubclass(c, Exception)]
    return (ValueError, DatasetsError, *(c for c in of_library if c is not Exception))


def _hub_error(source: Source, error: BaseException) -> PromptDataError:
    """One line: what is wrong with the dataset, and what to do about it."""
    told = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if any(word in str(error).casefold() for word in DENIED):
        return PromptDataError(
            f"dataset of source '{source.name}' is gated and cannot be read: {told}",
            where=source.dataset,
            fix="accept its terms on the hub, and set HF_TOKEN",
        )
    return PromptDataError(
        f"dataset of source '{source.name}' cannot be read: {told}",
        where=source.dataset,
        fix="check its name, split and subset, and that the hub can be reached",
    )
