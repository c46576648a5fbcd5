"""One damaged partition: which rows are good, where they go, and the journal that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datagen.errors import CorruptFile, RepairRefused
from datagen.store.arrow_part import Rows, open_batches, sha256_of
from datagen.store.atomic import fsync_dir, unlink_durably
from datagen.store.guards import Sound, examine
from datagen.store.journal import RECORD, Entry, Kind, read_journal, write_journal
from datagen.store.layout import PartitionLayout, part
from datagen.store.repair_rejections import repaired_rejections
from datagen.store.responses import ResponsesReader
from datagen.store.salvage import DamagedFile, write_rows
from datagen.store.seal import FileSummary, PartitionSummary
from datagen.store.states import ShardReader

Key = tuple[str, int]
KINDS = {"responses": Kind.RESPONSE, "states": Kind.STATES}


@dataclass(slots=True)
class _File:
    """A data file that can be read from end to end: sealed, or open (`.part`) up to its last row."""

    number: int
    path: Path
    ends: list[int]

    @property
    def end(self) -> int | None:
        """What a reader must be told of a file that has no footer yet."""
        return self.ends[-1] if self.path.suffix == ".part" else None


class PartitionRepair:
    """Brings a partition to a state that opens; `planned`: its samples; `checksums`: by file name."""

    def __init__(
        self, layout: PartitionLayout, digest: str, planned: set[Key], checksums: dict[str, str]
    ) -> None:
        self._layout, self._digest, self._planned = layout, digest, planned
        self._checksums = checksums
        self._seal = self._load_seal()
        self._records = self._load_journal()
        self._counts: Counter[str] = Counter()
        self._next = {
            kind: max([-1, *layout.numbers(kind), *self._listed(kind)]) + 1 for kind in KINDS
        }

    def run(self) -> Counter[str]:
        """Repair; returns rows kept, lost and re-opened. Raises RepairRefused, StorageFull."""
        said: dict[Key, NDArray[np.int32]] = {}
        contexts: dict[Key, int] = {}
        entries: list[Entry] = []
        for file in self._readable("responses"):
            entries += self._responses(file, said, contexts)
        captured: set[Key] = set()
        for file in self._readable("states"):
            entries += self._states(file, said, contexts, captured)
        self._count("responses", len(said))
        self._count("states", len(captured))
        rejected, reopened = repaired_rejections(
            self._layout, self._records, self._seal, responded=set(said), collected=captured
        )
        self._counts["rejections reopened"] += reopened
        entries += rejected
        write_journal(self._layout.journal, self._digest, entries)
        unlink_durably(self._layout.summary)
        self._remove_unreferenced(entries)
        return self._counts

    # -- what is known -------------------------------------------------------------------------

    def _load_seal(self) -> PartitionSummary | None:
        try:
            return PartitionSummary.load(self._layout.summary)
        except CorruptFile:
            return None

    def _load_journal(self) -> NDArray[np.void] | None:
        """The records, or None when they are not those that the seal was made over."""
        path, seal = self._layout.journal, self._seal
        try:
            records = read_journal(path, self._digest)
        except CorruptFile as e:
            if seal is None:
                raise RepairRefused(
                    f"{e.what}, and no seal says what the partition held",
                    where=path,
                    fix="restore the file, or remove this partition's directory to collect it again",
                ) from e
            return None
        if seal is not None:
            same = path.exists() and sha256_of(path) == seal.journal_sha256
            return records if same or not self._sealed_rows(seal) else None
        if not len(records) and any(self._layout.numbers(kind) for kind in KINDS):
            raise RepairRefused(
                "the journal holds nothing, and no seal says what the data files are",
                where=path,
                fix="restore the file, or remove this partition's directory to collect it again",
            )
        return records

    @staticmethod
    def _sealed_rows(seal: PartitionSummary) -> bool:
        """True when the seal alone says where each row lies."""
        files = [*seal.responses, *seal.states]
        return all(f.tells_rows for f in files)

    def _listed(self, kind: str) -> dict[int, FileSummary | None]:
        """Number -> what the seal says of a file, if it says anything; and those of the journal."""
        records = self._kept_records()
        numbers = records["file"][records["kind"] == KINDS[kind]]
        found: dict[int, FileSummary | None] = {int(n): None for n in np.unique(numbers)}
        if self._seal is not None:
            files: list[FileSummary] = getattr(self._seal, kind)
            found |= {int(f.name.removesuffix(".arrow").rpartition("-")[2]): f for f in files}
        return found

    def _kept_records(self) -> NDArray[np.void]:
        return np.zeros(0, dtype=RECORD) if self._records is None else self._records

    # -- files ---------------------------------------------------------------------------------

    def _readable(self, kind: str) -> Iterator[_File]:
        """Every file of a kind; of a damaged one, the copy of its good rows."""
        for number, listed in sorted(self._listed(kind).items()):
            path = self._path(kind, number)
            if not path.exists() and part(path).exists():
                path = part(path)
            records = self._kept_records()
            mine = records[(records["kind"] == KINDS[kind]) & (records["file"] == number)]
            told = listed is not None and listed.tells_rows
            ends = list(listed.row_ends) if listed and told else mine["end"].tolist()
            digests = listed.row_xxh3 if listed and told else ()
            sha256 = listed.sha256 if listed else self._checksums.get(path.name)
            file = _File(number, path, ends)
            self._counts[f"{kind} before"] += len(ends)
            if self._whole(kind, file, sha256):
                yield file
                continue
            if sha256 is not None and not digests:
                continue  # something in it is wrong, and nothing says which rows
            rows = DamagedFile(kind, path, ends, digests).good_rows()
            if rows:
                yield self._copied(kind, rows)

    def _whole(self, kind: str, file: _File, sha256: str | None) -> bool:
        if not file.path.exists() or not file.ends:
            return False
        if sha256 is not None:
            return sha256_of(file.path) == sha256
        try:
            if kind == "responses":
                return len(list(ResponsesReader(file.path, end=file.end))) == len(file.ends)
            shard = ShardReader(file.path, end=file.end)
            return all(len(shard.states(row)) for row in range(len(shard))) and len(shard) == len(
                file.ends
            )
        except CorruptFile:
            return False

    def _copied(self, kind: str, rows: dict[int, pa.RecordBatch]) -> _File:
        number = self._next[kind]
        self._next[kind] += 1
        path = self._path(kind, number)
        sealed, _ = write_rows(kind, path, rows)
        return _File(number, path, list(sealed.row_ends))

    def _path(self, kind: str, number: int) -> Path:
        return getattr(self._layout, kind)(number)  # type: ignore[no-any-return]

    # -- rows ----------------------------------------------------------------------------------

    def _responses(
        self, file: _File, said: dict[Key, NDArray[np.int32]], contexts: dict[Key, int]
    ) -> list[Entry]:
        kept: dict[int, tuple[Key, int]] = {}
        for row, answer in enumerate(ResponsesReader(file.path, end=file.end)):
            key = (answer.prompt_id, answer.turn)
            whole = len(answer.context_ids) and len(answer.response_ids)
            if key in self._planned and key not in said and whole:
                said[key] = np.concatenate([answer.context_ids, answer.response_ids])
                contexts[key] = len(answer.context_ids)
                kept[row] = (key, len(answer.response_ids))
        return self._entries("responses", file, kept)

    def _states(
        self,
        file: _File,
        said: dict[Key, NDArray[np.int32]],
        contexts: dict[Key, int],
        captured: set[Key],
    ) -> list[Entry]:
        shard = ShardReader(file.path, end=file.end)
        kept: dict[int, tuple[Key, int]] = {}
        for row in range(len(shard)):
            columns = shard.columns(row)
            prompt_id, _, turn = columns.sample_id.rpartition("-")
            key = (prompt_id, int(turn) if turn.isdecimal() else -1)
            if (
                key not in said
                or key in captured
                or not np.array_equal(said[key], columns.input_ids)
            ):
                continue
            mask = np.arange(len(columns.input_ids)) >= contexts[key]
            rows = shard.states(row).reshape(columns.n_tokens, -1)
            sound = isinstance(examine(rows, len(columns.input_ids), shard.spec), Sound)
            if sound and np.array_equal(columns.loss_mask, mask):
                captured.add(key)
                kept[row] = (key, columns.n_tokens)
        return self._entries("states", file, kept)

    def _entries(self, kind: str, file: _File, kept: dict[int, tuple[Key, int]]) -> list[Entry]:
        """The journal's records of these rows, after leaving the others out of the file."""
        if not kept:
            return []
        if len(kept) < len(file.ends):
            rows = Rows(open_batches(file.path, end=file.end))
            file = self._copied(kind, {row: rows[row] for row in kept})
        old = {
            (bytes(r["prompt_id"]).hex(), int(r["turn"])): r
            for r in self._kept_records()
            if r["kind"] == KINDS[kind]
        }
        entries = []
        for end, row in zip(file.ends, sorted(kept), strict=True):
            key, tokens = kept[row]
            before = old.get(key)
            attempts, time_ms = (
                (1, 0) if before is None else (int(before["attempts"]), int(before["time_ms"]))
            )
            entries.append(Entry(KINDS[kind], *key, file.number, end, tokens, attempts, time_ms))
        return entries

    def _count(self, kind: str, kept: int) -> None:
        before = self._counts.pop(f"{kind} before", 0)
        self._counts[f"{kind} kept"] += kept
        self._counts[f"{kind} lost"] += before - kept

    def _remove_unreferenced(self, entries: list[Entry]) -> None:
        used = {(e.kind, e.file) for e in entries}
        for kind in KINDS:
            for number in self._layout.numbers(kind):
                if (KINDS[kind], number) not in used:
                    path = self._path(kind, number)
                    path.unlink(missing_ok=True)
                    part(path).unlink(missing_ok=True)
        for name in ("recovered", "recovered.part"):
            for left in self._layout.root.glob(f"*.{name}"):
                left.unlink()
        fsync_dir(self._layout.root)
