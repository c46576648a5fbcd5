"""fingerprint.json: everything that changes the content of rows, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from datagen.errors import CorruptFile, FingerprintMismatch
from datagen.store.atomic import write_json_atomic
from datagen.store.files import read_bytes


def canonical_json(value: Any) -> bytes:
    """One spelling per value: sorted keys, no spaces."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


class Absent:
    """Stands for a field that a fingerprint does not have; None is a value."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


class Fingerprint:
    """Nested plain data with a digest; two runs with one digest may share a directory."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.digest = hashlib.sha256(canonical_json(fields)).hexdigest()

    def save(self, path: Path) -> None:
        """Write it, durably."""
        write_json_atomic(path, {"digest": self.digest, "fields": self.fields})

    @classmethod
    def load(cls, path: Path) -> Fingerprint:
        """Read it back; raises CorruptFile when digest and fields disagree."""
        try:
            stored = orjson.loads(read_bytes(path))
            loaded = cls(stored["fields"])
            digest = stored["digest"]
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as e:
            raise CorruptFile(
                f"no fingerprint can be read: {e!r}", where=path, fix="restore it, or use a new run"
            ) from e
        if loaded.digest != digest:
            raise CorruptFile(
                "the fields do not have the digest beside them",
                where=path,
                fix="undo the edit, or use a new run",
            )
        return loaded

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Dotted names of the fields that differ -> (here, there); a missing one is `ABSENT`."""
        return dict(_differing("", self.fields, other.fields))

    def require_same(self, stored: Fingerprint, where: Path) -> None:
        """Raise FingerprintMismatch naming every field in which this differs from `stored`."""
        differences = self.differences(stored)
        if differences:
            named = "; ".join(
                f"{k} is {new!r}, was {old!r}" for k, (new, old) in differences.items()
            )
            raise FingerprintMismatch(
                f"the run holds rows made under other settings: {named}",
                where=where,
                fix="repeat the run's own settings, or choose another run name",
            )


def _spelt(value: Any) -> bytes:
    """What the digest sees: 1, 1.0 and true are three values."""
    return b"" if value is ABSENT else canonical_json(value)


def _differing(name: str, here: Any, there: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(here, dict) and isinstance(there, dict):
        for key in sorted({*here, *there}):
            inner = f"{name}.{key}" if name else str(key)
            yield from _differing(inner, here.get(key, ABSENT), there.get(key, ABSENT))
    elif _spelt(here) != _spelt(there):
        yield name, (here, there)
