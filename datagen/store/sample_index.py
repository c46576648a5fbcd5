"""Where every collected sample of a finished run lies, from the journals alone: no shard is opened.

A journal record of 64 bytes names the sample, its file and its tokens, and the records of one file are
in the order of its rows. 58 bytes of memory a sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from datagen.errors import CorruptFile
from datagen.store.files import Location, beside, read_bytes
from datagen.store.journal import Kind, parse_journal
from datagen.store.manifest import Manifest, ShardEntry

_SAMPLE_ID = re.compile(r"([0-9a-f]{64})-(\d{1,5})")
_SHARD = re.compile(r"states-(\d{3,})\.arrow")


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """Columns over the collected samples, in the order of the shards and their rows.

    `splits`: of each of the shards `paths`.
    """

    paths: tuple[str, ...]
    splits: tuple[str, ...]
    _rows: NDArray[np.void]
    _keys: NDArray[np.uint64]
    _order: NDArray[np.uint32]

    @classmethod
    def of(cls, manifest: Manifest, where: Location) -> SampleIndex:
        """The index of the run that `manifest`, read from `where`, describes. Raises CorruptFile."""
        entries = [(name, e) for name, split in manifest.splits.items() for e in split.states]
        if len({e.path for _, e in entries}) != len(entries):
            raise CorruptFile("a shard is listed twice", where=str(where))
        parts: list[NDArray[np.void]] = []
        folders: dict[PurePosixPath, dict[int, NDArray[np.void]]] = {}
        for number, (_, entry) in enumerate(entries):
            folder = PurePosixPath(entry.path).parent
            if folder not in folders:
                journal = beside(where, str(folder / "journal.log"))
                folders[folder] = _by_file(journal, manifest.fingerprint)
            kept = _rows_of(entry, folders[folder], where)
            kept["shard"] = number
            parts.append(kept)
        rows = np.concatenate(parts) if parts else np.zeros(0, dtype=ROW)
        if len(rows) != manifest.samples.collected:
            raise CorruptFile(
                f"{len(rows)} samples in the journals, the manifest states "
                f"{manifest.samples.collected}",
                where=str(where),
                fix="run `datagen verify`",
            )
        keys = _keys_of(rows)
        order = np.argsort(keys, kind="stable").astype(np.uint32)
        return cls(
            paths=tuple(e.path for _, e in entries),
            splits=tuple(name for name, _ in entries),
            _rows=rows,
            _keys=keys[order],
            _order=order,
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """uint32 [n]: tokens of each sample."""
        tokens: NDArray[np.uint32] = self._rows["tokens"]
        return tokens

    @property
    def n_bytes(self) -> int:
        """Memory of the columns."""
        return self._rows.nbytes + self._keys.nbytes + self._order.nbytes

    def place(self, number: int) -> tuple[str, int, int, int]:
        """Of sample `number`: its id, its shard (in `paths`), its row there, its tokens."""
        prompt_id, turn, shard, row, tokens = self._rows[number].item()
        return f"{prompt_id.hex()}-{turn}", shard, row, tokens

    def sample_id(self, number: int) -> str:
        """The id of sample `number`."""
        return self.place(number)[0]

    def number(self, sample_id: str) -> int:
        """The place of a sample by its id; KeyError when it is not among the collected."""
        found = _SAMPLE_ID.fullmatch(sample_id)
        if found is None:
            raise KeyError(sample_id)
        prompt_id, turn = bytes.fromhex(found[1]), int(found[2])
        key = np.frombuffer(prompt_id[:8], dtype=">u8").astype(np.uint64)
        low, high = (int(np.searchsorted(self._keys, key, side)[0]) for side in ("left", "right"))
        for number in self._order[low:high].tolist():
            if self._rows[number].item()[:2] == (prompt_id, turn):
                return int(number)
        raise KeyError(sample_id)

    def of_split(self, split: str) -> NDArray[np.int64]:
        """Numbers of the samples of a split, in order."""
        chosen = np.array([s == split for s in self.splits], dtype=bool)
        return (
            np.flatnonzero(chosen[self._rows["shard"]])
            if len(self)
            else np.zeros(0, dtype=np.int64)
        )


ROW = np.dtype(
    [("prompt_id", "V32"), ("turn", "<u2"), ("shard", "<u4"), ("row", "<u4"), ("tokens", "<u4")]
)


def _by_file(journal: Location, fingerprint: str) -> dict[int, NDArray[np.void]]:
    """File number -> its rows in order, dtype ROW; a rejected sample has the turn 0xFFFF."""
    try:
        raw = read_bytes(journal)
    except (OSError, ValueError) as e:
        raise CorruptFile(
            f"no journal can be read: {e}", where=str(journal), fix="restore the file"
        ) from e
    records = parse_journal(raw, journal, fingerprint)
    states = records[records["kind"] == Kind.STATES]
    rejected = _rejected(records)
    found: dict[int, NDArray[np.void]] = {}
    for file in np.unique(states["file"]).tolist():
        of_file = states[states["file"] == file]
        rows = np.zeros(len(of_file), dtype=ROW)
        rows["prompt_id"] = np.ascontiguousarray(of_file["prompt_id"]).view("V32").reshape(-1)
        for name in ("turn", "tokens"):
            rows[name] = of_file[name]
        rows["row"] = np.arange(len(rows))
        if rejected:
            keys = zip(rows["prompt_id"], rows["turn"].tolist(), strict=True)
            rows["turn"][[(p.tobytes(), t) in rejected for p, t in keys]] = REJECTED_TURN
        found[file] = rows
    return found


REJECTED_TURN = 0xFFFF


def _rejected(records: NDArray[np.void]) -> set[tuple[bytes, int]]:
    rejected: set[tuple[bytes, int]] = set()
    for record in records[(records["kind"] == Kind.REJECTED) | (records["kind"] == Kind.RETRY)]:
        key = record["prompt_id"].tobytes(), int(record["turn"])
        if record["kind"] == Kind.REJECTED:
            rejected.add(key)
        else:
            rejected.discard(key)
    return rejected


def _rows_of(
    entry: ShardEntry, files: dict[int, NDArray[np.void]], where: Location
) -> NDArray[np.void]:
    """The collected rows of a shard. Raises CorruptFile when the journal has others."""
    name = _SHARD.fullmatch(PurePosixPath(entry.path).name)
    rows = files.get(int(name[1])) if name else None
    if rows is None:
        rows = np.zeros(0, dtype=ROW)
    if len(rows) != entry.rows:
        raise CorruptFile(
            f"{entry.path}: {entry.rows} rows stated, the journal has {len(rows)}",
            where=str(where),
            fix="run `datagen verify`",
        )
    collected: NDArray[np.void] = rows[rows["turn"] != REJECTED_TURN]
    return collected


def _keys_of(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """The first 8 bytes of each id as a number: ids are digests, so these are as good as random."""
    heads = np.ascontiguousarray(rows["prompt_id"]).view(">u8").reshape(-1, 4)[:, 0]
    return heads.astype(np.uint64)
