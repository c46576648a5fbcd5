"""A finished run as its samples: by id, by number, in order, whole or in part, from any process.

    run = RunReader.open("runs/demo/manifest.json")          # or an fsspec URL
    run.columns(sample_id).input_ids                         # no state is read
    run.states(sample_id, tokens=slice(0, 64), boundaries=[27])
    for number in run.numbers("train"): run.states(number)

Opening reads the manifest and the journals. Shards are opened when they are needed and forgotten when
too many are open; a forked process opens its own, and a pickled reader takes none along.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile
from datagen.store.files import Location, beside
from datagen.store.manifest import Manifest
from datagen.store.sample_index import SampleIndex
from datagen.store.states import SampleColumns, ShardReader, StatesSpec, TokenColumns

MAX_OPEN = 128


@dataclass(slots=True)
class _Open:
    """The shards that this process has open, the last used last."""

    pid: int = field(default_factory=os.getpid)
    gate: threading.Lock = field(default_factory=threading.Lock)
    shards: OrderedDict[int, ShardReader] = field(default_factory=OrderedDict)


class RunReader:
    """Samples are named by their id or by their number, the place in the index."""

    def __init__(self, manifest: Manifest, where: Location) -> None:
        """Use `open`."""
        self.manifest, self._where = manifest, where
        self.index = SampleIndex.of(manifest, where)
        states = manifest.states
        self.spec = StatesSpec(
            tuple(states.boundaries), states.final_norm, states.dtype, states.hidden_size,
            states.codec,
        )  # fmt: skip
        self._open = _Open()

    @classmethod
    def open(cls, manifest: Location) -> RunReader:
        """Open a run by its manifest. Raises CorruptFile when manifest and journals disagree."""
        return cls(Manifest.load(manifest), manifest)

    def __len__(self) -> int:
        return len(self.index)

    def numbers(self, split: str | None = None) -> NDArray[np.int64]:
        """Numbers of all samples or of a split's, in the order of the files."""
        return np.arange(len(self)) if split is None else self.index.of_split(split)

    def sample_id(self, number: int) -> str:
        """The id of sample `number`."""
        return self.index.sample_id(number)

    def columns(self, sample: str | int) -> SampleColumns:
        """Ids and mask; states are neither read nor decompressed. KeyError, CorruptFile."""
        shard, row, of = self._locate(sample)
        columns = shard.columns(row, of=of)
        lengths = (len(columns.input_ids), len(columns.loss_mask))
        if lengths != (columns.n_tokens, columns.n_tokens):
            raise CorruptFile(
                f"row {row}: {lengths} ids and mask for {columns.n_tokens} tokens",
                where=shard.where,
                fix="run `datagen verify`",
            )
        return columns

    def states(
        self,
        sample: str | int,
        *,
        tokens: slice = slice(None),
        boundaries: Sequence[int] | None = None,
        final: bool | None = None,
    ) -> NDArray[np.uint16]:
        """Bit patterns uint16 [tokens, L, H]: the boundaries asked for, in that order, then the final.

        By default every boundary and the final state; with `boundaries` the final state only where
        `final` is set. Frames that hold nothing asked for are not decompressed. KeyError for a
        sample, ValueError for a boundary that is not there; CorruptFile.
        """
        whole = boundaries is None and final is not False
        layers = None if whole else self._layers(boundaries, final)
        shard, row, of = self._locate(sample)
        return shard.states(row, tokens=tokens, layers=layers, of=of)

    def raw_plane(self, sample: str | int) -> NDArray[np.uint8]:
        """The sign and mantissa plane as it is stored, mapped without a copy where that can be."""
        shard, row, of = self._locate(sample)
        return shard.raw_plane(row, of=of)

    def samples(
        self, split: str | None = None
    ) -> Iterator[tuple[SampleColumns, NDArray[np.uint16]]]:
        """Every sample and its states, in the order of the files."""
        for number in self.numbers(split).tolist():
            yield self.columns(number), self.states(number)

    def token_columns(self, split: str | None = None) -> Iterator[TokenColumns]:
        """Ids and masks of all stored samples, a shard at a time and no state read: for statistics."""
        for number, name in enumerate(self.index.splits):
            if split in (None, name):
                yield self._shard(number).token_columns()

    def token_counts(self, split: str | None = None) -> NDArray[np.int64]:
        """Occurrences by token id over the supervised tokens."""
        counts = np.zeros(0, dtype=np.int64)
        for columns in self.token_columns(split):
            more = columns.supervised_counts()
            longer, shorter = (more, counts) if len(more) > len(counts) else (counts, more)
            longer[: len(shorter)] += shorter
            counts = longer
        return counts

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _open=_Open())

    # -- inside --------------------------------------------------------------------------------

    def _layers(self, boundaries: Sequence[int] | None, final: bool | None) -> list[int]:
        here = self.spec.boundaries
        wanted = here if boundaries is None else boundaries
        unknown = [b for b in wanted if b not in here]
        if unknown:
            raise ValueError(f"boundaries {unknown}: the run has {list(here)}")
        with_final = final if final is not None else boundaries is None
        return [here.index(b) for b in wanted] + [len(here)] * with_final

    def _locate(self, sample: str | int) -> tuple[ShardReader, int, tuple[str, int]]:
        """Shard, row in it, and the id and tokens that the journal has for it."""
        index = self.index
        number = index.number(sample) if isinstance(sample, str) else int(sample)
        if not 0 <= number < len(index):
            raise KeyError(number)
        sample_id, shard, row, tokens = index.place(number)
        return self._shard(shard), row, (sample_id, tokens)

    def _shard(self, number: int) -> ShardReader:
        if self._open.pid != os.getpid():  # a fork: its parent's lock may be held for ever
            self._open = _Open()
        opened = self._open
        with opened.gate:
            shard = opened.shards.get(number)
            if shard is None:
                shard = opened.shards[number] = self._open_shard(number)
                if len(opened.shards) > MAX_OPEN:
                    opened.shards.popitem(last=False)
            opened.shards.move_to_end(number)
        return shard

    def _open_shard(self, number: int) -> ShardReader:
        shard = ShardReader(beside(self._where, self.index.paths[number]))
        if shard.spec != self.spec:
            raise CorruptFile(
                f"its states are {shard.spec}, the manifest states {self.spec}",
                where=shard.where,
                fix="run `datagen verify`",
            )
        return shard
