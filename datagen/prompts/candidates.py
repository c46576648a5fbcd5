"""Chunks of candidates: prompts that can be read and asked, before any is compared with another.

A chunk is an Arrow IPC file without compression in the cache, one row per candidate; columns:
    source uint16         index of the source in its intake
    messages large_string (canonical JSON)      tools large_string? (JSON, keys as they came)
    language, category, licence, cap string?
    content_id fixed_size_binary[32]                      first_8 uint64 (its first bytes)
    exact_key uint64      words of every message, by role, and the tools
    tools_key uint64      the tools alone
    tie uint64            the rest of the row, for a choice between rows of equal content
    chars uint32          n_turns uint16
    turn_words list<uint32>    words of each user message
    words large_list<uint32>   word hashes: those of user messages first, then the others
    turns large_list<uint64>   one hash per user turn, then that of all of them together
Schema metadata `intake`: JSON of the chunk's IntakeCounts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from datagen.prompts.cache import write_cached
from datagen.prompts.identity import canonical_json, content_id
from datagen.prompts.normalise import Skeleton
from datagen.prompts.reader import Fault
from datagen.prompts.words import WordHashes, concatenated, hash_words, words_of

FORMAT = 4
SAMPLES_PER_REASON = 3
WORDS_AT_A_TIME = 1 << 17
SCHEMA = pa.schema(
    [
        ("source", pa.uint16()),
        ("messages", pa.large_string()),
        ("tools", pa.large_string()),
        ("language", pa.string()),
        ("category", pa.string()),
        ("licence", pa.string()),
        ("cap", pa.string()),
        ("content_id", pa.binary(32)),
        ("first_8", pa.uint64()),
        ("exact_key", pa.uint64()),
        ("tools_key", pa.uint64()),
        ("tie", pa.uint64()),
        ("chars", pa.uint32()),
        ("n_turns", pa.uint16()),
        ("turn_words", pa.list_(pa.uint32())),
        ("words", pa.large_list(pa.uint32())),
        ("turns", pa.large_list(pa.uint64())),
    ]
)


@dataclass(slots=True)
class IntakeCounts:
    """The books of raw rows: lines = accepted + blank + dropped + unclaimed, all told.

    `dropped[source][reason]`; source "" stands for rows whose source cannot be told.
    `samples[source][reason]`: up to three row numbers, with particulars.
    """

    lines: int = 0
    blank: int = 0
    unclaimed: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = field(default_factory=dict)
    samples: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def drop(self, source: str, fault: Fault, row: int) -> None:
        """Enter row number `row`, which gives no prompt."""
        self.dropped.setdefault(source, Counter())[fault.reason] += 1
        told = self.samples.setdefault(source, {}).setdefault(fault.reason, [])
        if len(told) < SAMPLES_PER_REASON:
            detail = fault.detail.encode("ascii", "backslashreplace").decode()[:120]
            told.append(f"{row}: {detail}" if detail else str(row))

    def add(self, other: IntakeCounts, label: str) -> None:
        """Add another chunk's books to these, its rows being those of the file `label`."""
        self.lines += other.lines
        self.blank += other.blank
        self.unclaimed += other.unclaimed
        self.accepted += other.accepted
        self.notes += other.notes
        for source, reasons in other.dropped.items():
            self.dropped.setdefault(source, Counter()).update(reasons)
        for source, told in other.samples.items():
            mine = self.samples.setdefault(source, {})
            for reason, places in told.items():
                named = [f"{label}:{place}" for place in places]
                mine[reason] = [*mine.get(reason, []), *named][:SAMPLES_PER_REASON]

    @property
    def n_dropped(self) -> int:
        """Rows dropped, for all reasons."""
        return sum(sum(reasons.values()) for reasons in self.dropped.values())

    def is_balanced(self) -> bool:
        """True when every line is accounted for."""
        rest = self.blank + self.unclaimed + self.n_dropped
        return self.lines == sum(self.accepted.values()) + rest

    def to_json(self) -> bytes:
        """As stored in a chunk."""
        return orjson.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def from_json(cls, data: bytes) -> IntakeCounts:
        """As read from a chunk."""
        plain = json.loads(data)
        dropped = {source: Counter(reasons) for source, reasons in plain.pop("dropped").items()}
        accepted, notes = Counter(plain.pop("accepted")), Counter(plain.pop("notes"))
        return cls(**plain, accepted=accepted, notes=notes, dropped=dropped)


@dataclass(frozen=True, slots=True)
class Description:
    """What a row says about itself beside its conversation."""

    language: str | None
    category: str | None
    licence: str
    cap: str | None


class ChunkBuilder:
    """Collects the candidates of one chunk."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        self._texts: list[list[str]] = []
        self._hashed: list[WordHashes] = []
        self._waiting = 0

    def add(self, source: int, skeleton: Skeleton, description: Description) -> Fault | None:
        """Take a candidate in; a Fault when its content cannot be written as JSON."""
        messages, tools = skeleton.messages, skeleton.tools
        try:
            identity = content_id(messages, tools)
            tools_canonical = b"" if tools is None else canonical_json(tools)
            row: dict[str, Any] = {
                "messages": canonical_json(messages).decode(),
                "tools": None if tools is None else orjson.dumps(tools).decode(),
            }
        except TypeError as e:
            return Fault("not_json", str(e))
        words = [(m["role"], words_of(m["content"])) for m in messages]
        asked = [spoken for role, spoken in words if role == "user"]
        by_role = "\n".join(f"{role} {' '.join(spoken)}" for role, spoken in words)
        told = (description.language, description.category, description.licence, description.cap)
        flat = [w for spoken in asked for w in spoken]
        row |= {
            "source": source,
            "language": description.language,
            "category": description.category,
            "licence": description.licence,
            "cap": description.cap,
            "content_id": identity,
            "first_8": int.from_bytes(identity[:8], "big"),
            "exact_key": _key(by_role.encode(), tools_canonical),
            "tools_key": _key(tools_canonical),
            "tie": _key(repr((told, row["messages"], row["tools"])).encode()),
            "chars": sum(len(m["content"]) for m in messages),
            "n_turns": skeleton.n_turns,
            "turn_words": [len(spoken) for spoken in asked],
            "turns": [*map(_turn_key, asked), _turn_key(flat)],
        }
        for role, spoken in words:
            if role != "user":
                flat.extend(spoken)
        self._texts.append(flat)
        self._waiting += len(flat)
        if self._waiting >= WORDS_AT_A_TIME:
            self._hash()
        for name, cells in self._columns.items():
            if name != "words":
                cells.append(row[name])
        return None

    def write(self, path: Path, counts: IntakeCounts) -> None:
        """Write the chunk whole, by rename. Raises StorageFull."""
        self._hash()
        hashes = concatenated(self._hashed)
        arrays = [
            pa.LargeListArray.from_arrays(pa.array(hashes.offsets), pa.array(hashes.words))
            if f.name == "words"
            else pa.array(self._columns[f.name], type=f.type)
            for f in SCHEMA
        ]
        schema = SCHEMA.with_metadata({"intake": counts.to_json()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
        write_cached(path, sink.getvalue())

    def _hash(self) -> None:
        """Turn the words that wait into numbers: text takes twenty times the room."""
        self._hashed.append(hash_words(self._texts))
        self._texts, self._waiting = [], 0


def _key(*parts: bytes) -> int:
    sha = hashlib.blake2b(digest_size=8)
    for part in parts:
        sha.update(len(part).to_bytes(8, "big"))
        sha.update(part)
    return int.from_bytes(sha.digest(), "big")


def _turn_key(words: list[str]) -> int:
    return _key(" ".join(words).encode())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk in the cache."""

    path: Path

    def counts(self) -> IntakeCounts:
        """Its books."""
        with pa.OSFile(str(self.path)) as source:
            return IntakeCounts.from_json(pa.ipc.open_file(source).schema.metadata[b"intake"])

    def n_rows(self) -> int:
        """Candidates in it."""
        return int(self.columns("source").num_rows)

    def columns(self, *names: str) -> pa.RecordBatch:
        """Some columns, read into memory."""
        options = pa.ipc.IpcReadOptions(
            included_fields=[SCHEMA.get_field_index(name) for name in names]
        )
        with pa.OSFile(str(self.path)) as source:
            return pa.ipc.open_file(source, options=options).get_batch(0).select(list(names))

    def take(self, rows: npt.NDArray[np.int64], *names: str) -> list[dict[str, Any]]:
        """Some columns of some rows, as dicts, in the order of `rows`.

        Mapped, and all columns at once: choosing columns while reading makes Arrow copy them whole.
        """
        with pa.memory_map(str(self.path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0).select(list(names))
            taken: list[dict[str, Any]] = batch.take(pa.array(rows)).to_pylist()
            return taken

    def words(self) -> WordHashes:
        """The word hashes of every row."""
        column = self.columns("words").column(0)
        return WordHashes(
            column.values.to_numpy(zero_copy_only=True),
            column.offsets.to_numpy(zero_copy_only=True),
        )


def read_chunk(path: Path) -> Chunk | None:
    """The chunk of that path, when it is whole."""
    try:
        chunk = Chunk(path)
        chunk.counts()
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return chunk
