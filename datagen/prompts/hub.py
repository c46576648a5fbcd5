"""Datasets of the Hugging Face hub, streamed: nothing is downloaded that is not read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from datagen.errors import PromptDataError
from datagen.prompts.mix import Source

LOCAL = "local"
COMMIT = re.compile("[0-9a-f]{40}")


def hub_revision(source: Source) -> str:
    """The commit that a dataset source stands for: the pinned one, else the hub's newest.

    Raises PromptDataError when the hub cannot be asked. A local directory stands for itself.
    """
    assert source.dataset is not None
    if os.path.isdir(source.dataset):
        return LOCAL
    if source.revision is not None and COMMIT.fullmatch(source.revision):
        return source.revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(source.dataset, revision=source.revision).sha)
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise _hub_error(source, e) from e


def hub_chunks(
    source: Source, revision: str, chunk_rows: int, skip_rows: int = 0
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a dataset source after the first `skip_rows`, in the dataset's order, in chunks.

    Raises PromptDataError.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    assert source.dataset is not None
    try:
        stream = load_dataset(
            source.dataset,
            name=source.subset,
            split=source.split,
            streaming=True,
            revision=None if revision == LOCAL else revision,
        )
        chunk: list[dict[str, Any]] = []
        for row in stream.skip(skip_rows):
            chunk.append(row)
            if len(chunk) == chunk_rows:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
    except (DatasetsError, HfHubHTTPError, OSError, ValueError) as e:
        raise _hub_error(source, e) from e


def _hub_error(source: Source, error: BaseException) -> PromptDataError:
    """One line: what is wrong with the dataset, and what to do about it."""
    told = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "gated" in str(error).casefold() or source.gated:
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
