"""From data files to chunks of candidates: each file is read once, whatever sources share it.

The unit of work is a chunk of raw rows. Chunks depend on the rows alone, so any number of worker
processes gives the same chunks, and a chunk that is in the cache is not made again: an interrupted
intake goes on where it stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson

from datagen.errors import PromptDataError
from datagen.prompts.adapters import adapt, claims, column_value, text_cell
from datagen.prompts.cache import cache_key, write_cached
from datagen.prompts.candidates import (
    FORMAT,
    Chunk,
    ChunkBuilder,
    Description,
    IntakeCounts,
    read_chunk,
)  # fmt: skip
from datagen.prompts.hub import hub_chunks, hub_revision
from datagen.prompts.language import language_of
from datagen.prompts.mix import Limits, Mix, Source, file_sha256
from datagen.prompts.normalise import Skeleton, normalise
from datagen.prompts.reader import Fault, RawLine, parse_line, read_lines, read_table_rows

CHUNK_ROWS = 4096
CHUNK_BYTES = 8 << 20
TABLE_ROWS = 2048
MOST_WAITING = 4
"""Chunks of raw rows that may wait for a worker: what bounds the memory of reading ahead."""
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
OnStep = Callable[[str, int, int | None], None]
"""Told (stage, done, total or None) while a long step runs."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How raw rows become candidates: the sources that share an origin, in order of the mix."""

    sources: tuple[Source, ...]
    limits: tuple[Limits, ...]

    def settings(self) -> list[Any]:
        """Everything that decides a chunk beside the raw rows."""
        kept = {
            "name",
            "adapter",
            "columns",
            "messages_json",
            "where",
            "licence",
            "category",
            "language",
        }
        return [
            [source.model_dump(mode="json", include=kept), limits.model_dump(mode="json"),
             source.cap_by.column if source.cap_by else None]
            for source, limits in zip(self.sources, self.limits, strict=True)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Intake:
    """A file (or hub dataset) that was read: its chunks, and whose source indices they hold."""

    label: str
    sources: tuple[Source, ...]
    chunks: tuple[Chunk, ...]
    counts: IntakeCounts


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """One chunk to make."""

    rows: list[RawLine] | list[dict[str, Any]]
    first: int
    reading: Reading
    path: Path


def readings_of(mix: Mix, sources: tuple[Source, ...]) -> list[Reading]:
    """Sources grouped by the origin that they share; each origin is read once."""
    groups: dict[bytes, list[Source]] = {}
    for source in sources:
        kept = {"file", "dataset", "subset", "split", "revision"}
        groups.setdefault(orjson.dumps(source.model_dump(mode="json", include=kept)), []).append(
            source
        )
    return [Reading(tuple(g), tuple(mix.limits_of(s) for s in g)) for g in groups.values()]


def take_in_reading(
    reading: Reading,
    files: Sequence[Path],
    cache: Path,
    pool: Executor | None,
    on_step: OnStep,
) -> list[Intake]:
    """Read an origin: its local files, or its hub dataset. Raises PromptDataError."""
    source = reading.sources[0]
    if source.dataset is not None:
        revision = hub_revision(source)
        key = cache_key(
            "hub", FORMAT, TABLE_ROWS, source.dataset, source.subset, source.split, revision,
            reading.settings(),
        )  # fmt: skip
        return [
            take_in(
                lambda made: hub_chunks(source, revision, TABLE_ROWS, made * TABLE_ROWS),
                source.dataset, reading, cache / key, pool, on_step, where=source.dataset,
            )
        ]  # fmt: skip
    return [take_in_file(path, reading, cache, pool, on_step) for path in files]


def take_in_file(
    path: Path, reading: Reading, cache: Path, pool: Executor | None, on_step: OnStep
) -> Intake:
    """Read one local file. Raises PromptDataError when it is missing, damaged or of no use."""
    key = cache_key("file", FORMAT, CHUNK_ROWS, CHUNK_BYTES, file_sha256(path), reading.settings())
    chunks = _table_chunks if path.suffix in TABLE_SUFFIXES else _line_chunks
    return take_in(
        lambda made: islice(chunks(path), made, None),
        path.name, reading, cache / key, pool, on_step, where=path,
    )  # fmt: skip


def take_in(
    chunks_after: Callable[[int], Iterator[list[Any]]],
    label: str,
    reading: Reading,
    folder: Path,
    pool: Executor | None,
    on_step: OnStep,
    *,
    where: Path | str,
) -> Intake:
    """Make the chunks of an origin, or find them in `folder`.

    `chunks_after(k)` gives the raw rows of chunk k and of those that follow; `label` names the
    origin in the reports.
    """
    done = folder / "done.json"
    made = _made(folder)
    if not _is_done(done, len(made)):
        first = 1 + sum(chunk.counts().lines for chunk in made)
        futures: deque[Future[Chunk]] = deque()
        for index, rows in enumerate(chunks_after(len(made)), len(made)):
            job = ChunkJob(rows, first, reading, folder / f"{index:05d}.arrow")
            first += len(rows)
            if pool is None:
                made.append(make_chunk(job))
            else:
                futures.append(pool.submit(make_chunk, job))
                if len(futures) > MOST_WAITING:
                    made.append(futures.popleft().result())
            on_step(f"read {label}", first - 1, None)
        made += [future.result() for future in futures]
        write_cached(done, orjson.dumps({"chunks": len(made)}))
    counts = IntakeCounts()
    for chunk in made:
        counts.add(chunk.counts(), label)
    if counts.n_dropped and not counts.accepted and not counts.unclaimed:
        told = next(iter(next(iter(counts.samples.values())).items()))
        raise PromptDataError(
            f"none of {counts.lines:,} rows is a prompt; first: {told[0]} at {told[1][0]}",
            where=where,
            fix="check the file's encoding, and the source's adapter and columns",
        )
    return Intake(label, reading.sources, tuple(made), counts)


def make_chunk(job: ChunkJob) -> Chunk:
    """Make one chunk. Pure but for the file it writes."""
    builder, counts = ChunkBuilder(), IntakeCounts()
    for number, raw in enumerate(job.rows, job.first):
        counts.lines += 1
        row = parse_line(raw) if isinstance(raw, RawLine) else raw
        if row is None:
            counts.blank += 1
            continue
        _take_in_row(row, number, job.reading, builder, counts)
    builder.write(job.path, counts)
    return Chunk(job.path)


def _take_in_row(
    row: Any, number: int, reading: Reading, builder: ChunkBuilder, counts: IntakeCounts
) -> None:
    if isinstance(row, Fault):
        counts.drop("", row, number)
        return
    index = next((i for i, s in enumerate(reading.sources) if claims(s, row)), None)
    if index is None:
        counts.unclaimed += 1
        return
    source, limits = reading.sources[index], reading.limits[index]
    raw = adapt(row, source)
    skeleton = raw if isinstance(raw, Fault) else normalise(raw, limits)
    fault = skeleton if isinstance(skeleton, Fault) else None
    if isinstance(skeleton, Skeleton):
        described = _describe(row, source, skeleton)
        fault = described if isinstance(described, Fault) else None
        if isinstance(described, Description):
            fault = builder.add(index, skeleton, described)
        if fault is None:
            counts.accepted[source.name] += 1
            counts.notes += skeleton.notes
    if fault is not None:
        counts.drop(source.name, fault, number)


def _describe(row: dict[str, Any], source: Source, skeleton: Skeleton) -> Description | Fault:
    own = text_cell(row, source, "license")
    if source.licence == "per-row" and own is None:
        return Fault("no_licence")
    cap = column_value(row, source.cap_by.column) if source.cap_by else None
    described = Description(
        language=source.language or text_cell(row, source, "language") or language_of(skeleton),
        category=source.category or text_cell(row, source, "category"),
        licence=own if source.licence == "per-row" and own else source.licence,
        cap=None if cap is None else str(cap),
    )
    for text in (described.language, described.category, described.licence, described.cap):
        if text is not None and not text.isprintable():
            return Fault("bad_description", ascii(text))
    return described


def _line_chunks(path: Path) -> Iterator[list[RawLine]]:
    chunk: list[RawLine] = []
    size = 0
    for line in read_lines(path):
        chunk.append(line)
        size += len(line.data)
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _table_chunks(path: Path) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in read_table_rows(path):
        chunk.append(row)
        if len(chunk) == TABLE_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _made(folder: Path) -> list[Chunk]:
    """The whole chunks in the cache, up to the first that is missing or torn."""
    made: list[Chunk] = []
    while (chunk := read_chunk(folder / f"{len(made):05d}.arrow")) is not None:
        made.append(chunk)
    return made


def _is_done(done: Path, n_made: int) -> bool:
    try:
        return bool(orjson.loads(done.read_bytes())["chunks"] == n_made)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor | None]:
    """Processes for chunks; none at all when one worker is enough.

    Raises PromptDataError when a process is killed under it.
    """
    if workers <= 1:
        yield None
        return
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield pool
    except BrokenProcessPool as e:
        raise PromptDataError(
            "a worker process died while reading prompts",
            fix="run the same command again: it goes on where it stopped; with fewer workers if "
            "memory is short",
        ) from e
