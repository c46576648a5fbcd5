"""Samples of finished runs: an index of them, and the reading of one. The seam to the store.

`StatesSource` is all that training knows of where states come from; `ManifestSource` is the one that
reads a run's manifest and shards. Threads share the open shards: reading has no position.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from datagen.drafter.rows import Sample
from datagen.errors import ConfigError, CorruptFile
from datagen.store.files import read_bytes
from datagen.store.manifest import Manifest, ShardEntry
from datagen.store.run_reader import MAX_OPEN
from datagen.store.states import ShardReader

FinalNorm = Literal["post", "pre", "none"]
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample is, and its size: `n_tokens` = N, `n_context` = P."""

    source: int
    shard: int
    row: int
    sample_id: str
    prompt_id: str
    n_tokens: int
    n_context: int


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a source's rows are, and what proves which rows: the manifest file's sha256."""

    path: str
    sha256: str
    boundaries: tuple[int, ...]
    final_norm: FinalNorm
    hidden_size: int
    target_model: str
    target_revision: str
    token_frequencies: dict[int, int]
    stop_token_ids: tuple[int, ...]


class StatesSource(Protocol):
    """Captured samples of one run."""

    @property
    def info(self) -> SourceInfo:
        """What the rows are."""
        ...

    def index(self, split: str, number: int) -> list[SampleRef]:
        """Every sample of a split, in a fixed order; `number` becomes their `source`."""
        ...

    def ids(self, ref: SampleRef) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [N] and loss mask int8 [N]."""
        ...

    def read(self, ref: SampleRef, n_tokens: int) -> Sample:
        """The first `n_tokens` of a sample with their states. Raises CorruptFile."""
        ...


class ManifestSource:
    """A run by its manifest.json. Raises CorruptFile when a shard is missing or of another size."""

    def __init__(self, path: Path) -> None:
        self._root = path.parent
        self._manifest = Manifest.load(path)
        self._manifest.require_files(self._root)
        self._shards: list[ShardEntry] = [
            f for split in self._manifest.splits.values() for f in split.states
        ]
        self._gate = threading.Lock()
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()  # the last used last
        states, target = self._manifest.states, self._manifest.target
        if states.dtype not in TORCH_DTYPES:
            raise ConfigError(f"states in {states.dtype} are not read", where=path)
        self._dtype = TORCH_DTYPES[states.dtype]
        self.info = SourceInfo(
            path=str(path),
            sha256=hashlib.sha256(read_bytes(path)).hexdigest(),
            boundaries=tuple(states.boundaries),
            final_norm=states.final_norm,
            hidden_size=states.hidden_size,
            target_model=str(target.get("model", "")),
            target_revision=str(target.get("revision", "")),
            token_frequencies={int(k): v for k, v in self._manifest.token_frequencies.items()},
            stop_token_ids=tuple(self._manifest.settings.get("stop_token_ids", ())),
        )

    def __reduce__(self) -> tuple[type[ManifestSource], tuple[Path]]:
        """Another process opens it anew."""
        return ManifestSource, (Path(self.info.path),)

    def index(self, split: str, number: int) -> list[SampleRef]:
        """Every sample of the split in the order of the manifest; ids and masks are read, no states."""
        entry = self._manifest.splits.get(split)
        wanted = {f.path for f in entry.states} if entry else set()
        found: list[SampleRef] = []
        for shard, file in enumerate(self._shards):
            if file.path not in wanted:
                continue
            reader = ShardReader(self._root / file.path)
            if len(reader) != file.rows:
                raise CorruptFile(
                    f"{len(reader)} rows, the manifest states {file.rows}",
                    where=self._root / file.path,
                    fix="run `datagen verify`",
                )
            for row in range(len(reader)):
                c = reader.columns(row)
                found.append(
                    SampleRef(
                        source=number, shard=shard, row=row, sample_id=c.sample_id,
                        prompt_id=c.prompt_id, n_tokens=c.n_tokens,
                        n_context=c.n_tokens - int(c.loss_mask.sum()),
                    )
                )  # fmt: skip
        return found

    def ids(self, ref: SampleRef) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and mask of a sample."""
        columns = self._reader(ref.shard).columns(ref.row)
        return columns.input_ids, columns.loss_mask

    def read(self, ref: SampleRef, n_tokens: int) -> Sample:
        """Ids and states of a sample; the mask must be 0 over a context and 1 after it."""
        reader = self._reader(ref.shard)
        # First, for it asks for the row as a whole: ids, faulted in, would bring their neighbours along.
        bits_TLH = reader.states(
            ref.row, tokens=slice(0, n_tokens), of=(ref.sample_id, ref.n_tokens)
        )
        ids, mask = self.ids(ref)
        if not (mask[ref.n_context :] == 1).all():
            raise CorruptFile(
                f"row {ref.row}: the loss mask is no context followed by a response",
                where=self._root / self._shards[ref.shard].path,
            )
        states_TLH = as_tensor(bits_TLH, self._dtype)
        n_layers = states_TLH.shape[1]
        kept = n_layers if self.info.final_norm == "none" else n_layers - 1
        return Sample(
            sample_id=ref.sample_id,
            ids_N=torch.from_numpy(ids[:n_tokens].astype(np.int64)),
            n_context=ref.n_context,
            features_NW=states_TLH.flatten(1)[:, : kept * states_TLH.shape[2]],  # a view
            final_NH=states_TLH[:, kept] if kept < n_layers else None,
        )

    def _reader(self, shard: int) -> ShardReader:
        with self._gate:
            if shard not in self._readers:
                self._readers[shard] = ShardReader(self._root / self._shards[shard].path)
                if len(self._readers) > MAX_OPEN:
                    self._readers.popitem(last=False)
            self._readers.move_to_end(shard)
            return self._readers[shard]


def as_tensor(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Bit patterns uint16 as floats of `dtype`, without a copy."""
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


def open_sources(paths: Sequence[Path]) -> list[ManifestSource]:
    """Open manifests that can be trained on together; raises ConfigError naming what differs."""
    if not paths:
        raise ConfigError("no manifest", fix="name the manifest.json of a finished run")
    sources = [ManifestSource(p) for p in paths]
    first = sources[0].info
    for source in sources[1:]:
        for name in ("target_model", "target_revision", "boundaries", "hidden_size", "final_norm"):
            one, other = getattr(first, name), getattr(source.info, name)
            if one != other:
                raise ConfigError(
                    f"{name} is {other}, and {one} in {first.path}", where=source.info.path,
                    fix="train on runs of one target and one capture",
                )  # fmt: skip
    return sources


def require_disjoint(train: Sequence[SampleRef], heldout: Sequence[SampleRef]) -> None:
    """Raise ConfigError when a prompt is on both sides, whatever the splits are called."""
    shared = {r.prompt_id for r in train} & {r.prompt_id for r in heldout}
    if shared:
        one = min(shared)
        raise ConfigError(
            f"{len(shared)} held-out prompts are in the training data too, {one[:16]} among them",
            fix="hold out other prompts: acceptance on trained ones says nothing",
        )


def first_by_hash(refs: Sequence[SampleRef], count: int) -> list[SampleRef]:
    """`count` samples, the same at any seed; a smaller count is contained in a larger one.

    Turns of one prompt stay together. In the order of `refs`.
    """
    if not 0 < count < len(refs):
        return list(refs)
    order = sorted(range(len(refs)), key=lambda i: (_hash(refs[i].prompt_id), refs[i].sample_id))
    return [refs[i] for i in sorted(order[:count])]


def _hash(prompt_id: str) -> bytes:
    return hashlib.sha256(f"subset:{prompt_id}".encode()).digest()
