"""fingerprint.json: everything that changes the content of rows, and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from datagen.errors import CorruptFile, FingerprintMismatch
from datagen.store.atomic import write_json_atomic


def canonical_json(value: Any) -> bytes:
    """One spelling per value: sorted keys, no spaces."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


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
            stored = orjson.loads(path.read_bytes())
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
        """Dotted names of the fields that differ -> (here, there)."""
        here, there = _flat(self.fields), _flat(other.fields)
        return {
            name: (here.get(name), there.get(name))
            for name in sorted({*here, *there})
            if here.get(name) != there.get(name)
        }

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


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: value}
