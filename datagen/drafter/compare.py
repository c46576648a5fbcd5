"""`datagen drafter compare A B`: can one checkpoint stand in for the other, and if not, why?"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datagen.drafter.checkpoint import CONFIG, EMBEDDING, MAPS, read_tensors
from datagen.drafter.config import DrafterConfig, read_config
from datagen.errors import ConfigError

# Differences in these change what a served drafter computes; others are a matter of storage.
DECISIVE = tuple(f.name for f in fields(DrafterConfig) if f.name != "max_positions")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: shape and dtype on each side ('' where absent), and the verdict on it."""

    name: str
    a: str
    b: str
    verdict: str
    blocks: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`config`: (key, a, b) of what differs. Drop-in when nothing blocks."""

    tensors: list[TensorRow]
    config: list[tuple[str, str, str]]
    reasons: list[str]

    @property
    def drop_in(self) -> bool:
        """B can be served, or trained from, where A was, without another change."""
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "drop_in": self.drop_in,
            "reasons": self.reasons,
            "config": [{"key": k, "a": a, "b": b} for k, a, b in self.config],
            "tensors": [
                {"name": t.name, "a": t.a, "b": t.b, "verdict": t.verdict} for t in self.tensors
            ],
        }


def compare(a: Path, b: Path, *, target_type: str | None = None) -> Comparison:
    """Names, shapes, dtypes, vocabulary maps, and the config keys that matter.

    Configs that cannot be read as a drafter's are reasons, not errors: comparing is asked when
    something is odd. Raises ConfigError when there are no tensors to compare.
    """
    left, right = read_tensors(a), read_tensors(b)
    rows = [_row(n, left.get(n), right.get(n)) for n in sorted(set(left) | set(right))]
    reasons = [f"{r.name}: {r.verdict}" for r in rows if r.blocks]
    configs: list[DrafterConfig] = []
    for directory in (a, b):
        try:
            configs.append(read_config(directory / CONFIG, target_type=target_type))
        except ConfigError as e:
            reasons.append(str(e))
    differences: list[tuple[str, str, str]] = []
    if len(configs) == 2:
        for field in fields(DrafterConfig):
            one, other = (getattr(c, field.name) for c in configs)
            if one != other:
                differences.append((field.name, _shown(one), _shown(other)))
                if field.name in DECISIVE and None not in (one, other):
                    reasons.append(f"{field.name} is {_shown(one)} and {_shown(other)}")
    ids = [_engine_ids(d) for d in (a, b)]
    if ids[0] != ids[1]:
        differences.append(("engine layer ids", str(ids[0]), str(ids[1])))
        if len(configs) == 2 and None in (configs[0].boundaries, configs[1].boundaries):
            reasons.append(
                f"engine layer ids are {ids[0]} and {ids[1]} (give --target to compare boundaries)"
            )
    return Comparison(rows, differences, reasons)


def _engine_ids(directory: Path) -> object:
    try:
        raw = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "unreadable"
    return (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _row(name: str, a: Tensor | None, b: Tensor | None) -> TensorRow:
    left, right = ("" if t is None else f"{list(t.shape)} {str(t.dtype)[6:]}" for t in (a, b))
    if a is None or b is None:
        optional = name == EMBEDDING
        where = "only in A" if b is None else "only in B"
        note = ": the target's, may be absent" if optional else ""
        return TensorRow(name, left, right, where + note, not optional)
    if a.shape != b.shape:
        return TensorRow(name, left, right, "other shape", True)
    if name in MAPS:
        same = torch.equal(a.to(torch.int64), b.to(torch.int64))
        verdict = "same map" if same else "another vocabulary map: lm_head rows mean other tokens"
        return TensorRow(name, left, right, verdict, not same)
    same = torch.equal(a.float(), b.float())
    kind = "" if a.dtype == b.dtype else ", other dtype"
    return TensorRow(name, left, right, ("same values" if same else "other values") + kind, False)
