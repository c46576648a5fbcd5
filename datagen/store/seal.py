"""partition.json: the seal of a partition, written last. What it holds, and every file's checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
from pydantic import Field, ValidationError

from datagen.errors import CorruptFile
from datagen.store.atomic import write_json_atomic
from datagen.store.files import read_bytes
from datagen.strict import StrictModel

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class FileSummary(StrictModel):
    """A sealed file, by its name in the partition's directory."""

    name: str = Field(pattern=r"^(responses|states)-\d{3,}\.arrow$")
    rows: Count
    tokens: Count
    n_bytes: Count
    sha256: Sha256
    row_ends: tuple[Count, ...] = ()
    row_xxh3: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = ()
    """See `SealedFile`; empty in seals of earlier versions."""

    @property
    def tells_rows(self) -> bool:
        """True when it says where each row lies, and what its digest is."""
        return len(self.row_ends) == len(self.row_xxh3) == self.rows


class PartitionSummary(StrictModel):
    """The whole of partition.json. `rejected`: by reason; times in Unix seconds."""

    fingerprint: Sha256
    prompts: Count
    collected: Count
    rejected: dict[str, Count]
    tokens_generated: Count
    tokens_captured: Count
    responses: list[FileSummary]
    states: list[FileSummary]
    journal_sha256: Sha256
    rejections_sha256: Sha256 | None
    opened_at: float
    sealed_at: float

    @classmethod
    def load(cls, path: Path) -> PartitionSummary:
        """Read a seal; raises CorruptFile naming the field."""
        try:
            return cls.model_validate(orjson.loads(read_bytes(path)))
        except ValidationError as e:
            first = e.errors()[0]
            name = ".".join(map(str, first["loc"])) or "seal"
            raise CorruptFile(f"{name}: {first['msg']}", where=path, fix=FIX) from e
        except (OSError, orjson.JSONDecodeError) as e:
            raise CorruptFile(f"no partition seal: {e}", where=path, fix=FIX) from e

    def save(self, path: Path) -> None:
        """Write it, durably."""
        write_json_atomic(path, self.model_dump(mode="json"))


FIX = "remove the file and run the collect again: it seals the partition anew"
