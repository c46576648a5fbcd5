"""manifest.json: the hand-off of a finished run. What was collected, from what, how; all accounted for.

Reading one executes nothing, and no path in it can leave its directory.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationError, model_validator

from datagen.errors import CorruptFile
from datagen.store.atomic import write_json_atomic
from datagen.store.files import Location, beside, local_path, read_bytes
from datagen.store.layout import RunLayout
from datagen.store.plan import Plan
from datagen.store.responses import ResponsesReader
from datagen.store.seal import Count, FileSummary, PartitionSummary, Sha256
from datagen.store.states import MAX_TOKEN_ID
from datagen.strict import StrictModel

VERSION = 1
LENGTH_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
BYTES_PER_VALUE = 2


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.name or pure.is_absolute() or ".." in pure.parts or set(path) & {"\\", "\0"}:
        raise ValueError(f"{path!r} is no path inside the run directory")
    return path


RelativePath = Annotated[str, AfterValidator(_inside)]


class ShardEntry(StrictModel):
    """A file of the run: path relative to the manifest, rows, tokens, bytes, sha256."""

    path: RelativePath
    partition: Count
    rows: Count
    tokens: Count
    bytes: Count
    sha256: Sha256


class SampleCounts(StrictModel):
    """In samples, one per user turn; planned = collected + rejected + pending, checked."""

    planned: Count
    collected: Count
    rejected: dict[str, Count]
    pending: Count

    @model_validator(mode="after")
    def _nothing_is_lost(self) -> SampleCounts:
        accounted = self.collected + sum(self.rejected.values()) + self.pending
        if self.planned != accounted:
            raise ValueError(f"planned {self.planned} but {accounted} samples are accounted for")
        return self


class SplitEntry(StrictModel):
    """One split: its counts, its files, and the digest of its prompts (sha256 over sorted ids)."""

    prompts: Count
    samples: SampleCounts
    prompts_sha256: Sha256
    tokens_generated: Count
    tokens_captured: Count
    responses: list[ShardEntry]
    states: list[ShardEntry]


class StatesEntry(StrictModel):
    """What a row of states is: boundaries as Hugging Face indices, then the final state."""

    boundaries: list[int]
    final_norm: Literal["post", "pre"]
    dtype: str
    hidden_size: int = Field(gt=0)
    codec: str


class ManifestHeader(StrictModel):
    """What the collect job knows: target, settings, servers, versions."""

    run: str
    code_version: str
    fingerprint: Sha256
    target: dict[str, Any]
    sampling: dict[str, Any]
    settings: dict[str, Any]
    states: StatesEntry
    servers: list[dict[str, Any]]
    preflight: dict[str, Any]


class Manifest(ManifestHeader):
    """The whole of manifest.json."""

    version: Literal[1] = 1
    created: str
    plan_digest: Sha256
    samples: SampleCounts
    prompts: Count
    splits: dict[str, SplitEntry]
    stored_bytes: Count
    raw_bytes: Count
    token_frequencies: dict[str, int]
    """Supervised token id (as text) -> occurrences in the train split's responses."""
    length_histogram: list[tuple[int, int]]
    """(lower edge in tokens, samples) of context + response."""

    @classmethod
    def load(cls, path: Location) -> Manifest:
        """Read and validate; raises CorruptFile naming the field."""
        where = str(path)
        try:
            return cls.model_validate(orjson.loads(read_bytes(path)))
        except FileNotFoundError as e:
            raise CorruptFile("no manifest", where=where, fix="finish the collect first") from e
        except ValidationError as e:
            first = e.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise CorruptFile(f"{name or 'manifest'}: {first['msg']}", where=where) from e
        except (OSError, ValueError) as e:
            raise CorruptFile(
                f"no manifest can be read: {e}",
                where=where,
                fix="run the collect again; it writes a lost one anew, so remove one that is damaged",
            ) from e

    def require_files(self, root: Path) -> None:
        """Raise CorruptFile unless every data file is under `root` and of its stated size."""
        for entry in self.files():
            path = local_path(beside(root / "manifest.json", entry.path))
            assert path is not None
            found = path.stat().st_size if path.is_file() else None
            if found != entry.bytes:
                raise CorruptFile(
                    f"{'no file' if found is None else f'{found} bytes'}, "
                    f"the manifest states {entry.bytes}",
                    where=path,
                    fix="run `datagen verify`",
                )

    def files(self) -> Iterable[ShardEntry]:
        """Every data file, responses and states, of all splits."""
        for split in self.splits.values():
            yield from split.responses
            yield from split.states


def manifest_schema() -> dict[str, Any]:
    """The JSON schema of manifest.json; `python -m datagen.store.manifest` prints it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Manifest.model_json_schema(mode="serialization"),
    }


def build_manifest(layout: RunLayout, plan: Plan, header: ManifestHeader) -> Manifest:
    """Merge the partitions' seals and write manifest.json, atomically, last.

    Raises CorruptFile when a partition has no seal.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = merge_seals(layout, plan, header, created)
    write_json_atomic(layout.manifest, manifest.model_dump(mode="json"))
    return manifest


def merge_seals(layout: RunLayout, plan: Plan, header: ManifestHeader, created: str) -> Manifest:
    """The manifest that the seals, the plan and the responses on disk make. Raises CorruptFile."""
    summaries = [
        PartitionSummary.load(layout.partition(i).summary) for i in range(plan.n_partitions)
    ]
    frequencies, lengths = _statistics(layout, plan, summaries)
    splits = {s: _split(plan, summaries, s) for s in ("train", "heldout")}
    states = header.states
    tokens = sum(s.tokens_captured for s in splits.values())
    counts = [s.samples for s in splits.values()]
    rejected: Counter[str] = Counter()
    for count in counts:
        rejected.update(count.rejected)
    return Manifest(
        **{name: getattr(header, name) for name in ManifestHeader.model_fields},
        created=created,
        plan_digest=plan.digest,
        samples=SampleCounts(
            planned=sum(c.planned for c in counts),
            collected=sum(c.collected for c in counts),
            rejected=dict(sorted(rejected.items())),
            pending=sum(c.pending for c in counts),
        ),
        prompts=plan.n_prompts,
        splits=splits,
        stored_bytes=sum(f.bytes for s in splits.values() for f in s.states),
        raw_bytes=tokens * (len(states.boundaries) + 1) * states.hidden_size * BYTES_PER_VALUE,
        token_frequencies={str(i): int(frequencies[i]) for i in np.flatnonzero(frequencies)},
        length_histogram=[(edge, int(n)) for edge, n in zip(LENGTH_EDGES, lengths, strict=True)],
    )


def _split(plan: Plan, summaries: list[PartitionSummary], split: str) -> SplitEntry:
    numbers = [i for i in range(plan.n_partitions) if plan.split_of_partition(i) == split]
    ids: list[str] = []
    planned = 0
    for i in numbers:
        for prompt in plan.partition(i):
            ids.append(prompt.prompt_id)
            planned += prompt.n_turns
    ids.sort()
    rejected: Counter[str] = Counter()
    for i in numbers:
        rejected.update(summaries[i].rejected)
    collected = sum(summaries[i].collected for i in numbers)

    def entries(kind: str) -> list[ShardEntry]:
        found: list[ShardEntry] = []
        for i in numbers:
            files: list[FileSummary] = getattr(summaries[i], kind)
            found += [
                ShardEntry(
                    path=f"partitions/{i:05d}/{f.name}", partition=i, rows=f.rows,
                    tokens=f.tokens, bytes=f.n_bytes, sha256=f.sha256,
                )
                for f in files
            ]  # fmt: skip
        return found

    return SplitEntry(
        prompts=len(ids),
        samples=SampleCounts(
            planned=planned,
            collected=collected,
            rejected=dict(sorted(rejected.items())),
            pending=planned - collected - rejected.total(),
        ),
        prompts_sha256=hashlib.sha256("\n".join(ids).encode()).hexdigest(),
        tokens_generated=sum(summaries[i].tokens_generated for i in numbers),
        tokens_captured=sum(summaries[i].tokens_captured for i in numbers),
        responses=entries("responses"),
        states=entries("states"),
    )


def _statistics(
    layout: RunLayout, plan: Plan, summaries: list[PartitionSummary]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Occurrences by token id over train responses, and the histogram of sample lengths."""
    frequencies = np.zeros(0, dtype=np.int64)
    histogram = np.zeros(len(LENGTH_EDGES), dtype=np.int64)
    for index, summary in enumerate(summaries):
        train = plan.split_of_partition(index) == "train"
        for file in summary.responses:
            path = layout.partition(index).root / file.name
            said, lengths = [], []
            for response in ResponsesReader(path):
                said.append(response.response_ids)
                lengths.append(len(response.context_ids) + len(response.response_ids))
            histogram += np.histogram(lengths, bins=[*LENGTH_EDGES, np.inf])[0]
            if train and said:
                frequencies = _added(frequencies, np.concatenate(said), path)
    return frequencies, histogram


def _added(frequencies: NDArray[np.int64], ids: NDArray[np.int32], path: Path) -> NDArray[np.int64]:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < MAX_TOKEN_ID:
        raise CorruptFile(
            f"token ids from {ids.min()} to {ids.max()}", where=path, fix="run `datagen verify`"
        )
    counted = np.bincount(ids, minlength=len(frequencies))
    counted[: len(frequencies)] += frequencies
    return counted


if __name__ == "__main__":
    sys.stdout.write(json.dumps(manifest_schema(), indent=2) + "\n")
