"""What a chunk's candidates are compared by: their sketches, and the held-out set each contains.

Both are pure functions of a chunk and of settings, made in worker processes and kept in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datagen.prompts.cache import cache_key, load_arrays, save_arrays
from datagen.prompts.candidates import Chunk
from datagen.prompts.contamination import NO_SET, HeldoutIndex, contaminated
from datagen.prompts.intake import OnStep
from datagen.prompts.minhash import Sketch, sketch
from datagen.prompts.mix import Decontaminate, Near
from datagen.prompts.population import Population

FORMAT = 1


@dataclass(frozen=True, slots=True)
class MarkJob:
    """One chunk to mark."""

    chunk: Chunk
    near: Near | None
    index: Path
    index_digest: str
    rule: Decontaminate

    @property
    def sketch_path(self) -> Path:
        """Where the chunk's sketches are kept."""
        near = None if self.near is None else self.near.model_dump(exclude={"threshold"})
        return self.chunk.path.with_suffix(f".sketch-{cache_key(FORMAT, near)}.npz")

    @property
    def contamination_path(self) -> Path:
        """Where the numbers of the sets are kept."""
        key = cache_key(FORMAT, self.index_digest, self.rule.model_dump(exclude={"against"}))
        return self.chunk.path.with_suffix(f".heldout-{key}.npz")


def mark(job: MarkJob) -> None:
    """Make the marks that the cache does not have."""
    if load_arrays(job.contamination_path) is None:
        save_arrays(job.contamination_path, sets=contaminated(job.chunk, job.index, job.rule))
    if job.near is not None and load_arrays(job.sketch_path) is None:
        salt = job.chunk.columns("tools_key").column(0).to_numpy()
        made = sketch(job.chunk.words(), job.near, salt)
        save_arrays(job.sketch_path, bands=made.bands, low=made.low, sketched=made.sketched)


def mark_all(
    population: Population,
    near: Near | None,
    rule: Decontaminate,
    index: HeldoutIndex,
    cache: Path,
    pool: Executor | None,
    on_step: OnStep,
) -> list[MarkJob]:
    """Mark every chunk of a population."""
    digest = index.digest()
    path = cache / f"heldout-{cache_key(FORMAT, digest)}.npz"
    if load_arrays(path) is None:
        index.save(path)
    jobs = [MarkJob(chunk, near, path, digest, rule) for chunk in population.chunks]
    for done, _ in enumerate(pool.map(mark, jobs) if pool else map(mark, jobs), 1):
        on_step("compare with held-out sets", done, len(jobs))
    return jobs


def sets_of(population: Population, jobs: Sequence[MarkJob]) -> npt.NDArray[np.int16]:
    """The set that each candidate is contaminated by, or NO_SET, in population order, [n]."""
    result = np.full(len(population), NO_SET, dtype=np.int16)
    for chunk, positions in population.by_chunk(np.arange(len(population))):
        sets = _loaded(jobs[chunk].contamination_path)["sets"]
        result[positions] = sets[population.place[positions, 1]]
    return result


def sketches_of(population: Population, jobs: Sequence[MarkJob], near: Near) -> Sketch:
    """All sketches, in population order."""
    n = len(population)
    whole = Sketch(
        bands=np.zeros((n, near.bands), dtype=np.uint32),
        low=np.zeros((n, near.permutations), dtype=np.uint8),
        sketched=np.zeros(n, dtype=np.bool_),
    )
    for chunk, positions in population.by_chunk(np.arange(n)):
        made = _loaded(jobs[chunk].sketch_path)
        inside = population.place[positions, 1]
        whole.bands[positions] = made["bands"][inside]
        whole.low[positions] = made["low"][inside]
        whole.sketched[positions] = made["sketched"][inside]
    return whole


def _loaded(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    arrays = load_arrays(path)
    if arrays is None:
        raise FileNotFoundError(path)
    return arrays
