"""The target's final norm, taken off a stored final state.

A trainer that applies the norm itself must be given x with norm(x) = final. RMSNorm is
norm(x) = w * x / rms(x), and final / w has rms 1 (it is what the norm's division gave), so
x = final / w, up to the epsilon and to the rounding of 16 bits.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datagen.errors import ExportRefused

NAMES = ("model.norm.weight", "language_model.model.norm.weight", "norm.weight")
OFFSET_FAMILIES = ("gemma",)  # their norm multiplies by 1 + w


def final_norm_weight(checkpoint: Path, hidden: int) -> NDArray[np.float32]:
    """The factor of the final norm by channel, float32 [H]. Raises ExportRefused."""
    from safetensors import safe_open

    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        index = checkpoint / "model.safetensors.index.json"
        places: dict[str, str] = (
            json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.exists() else {}
        )
        weight = None
        for name in NAMES:
            file = checkpoint / Path(places.get(name, "model.safetensors")).name
            if (places and name not in places) or not file.exists():
                continue
            with safe_open(file, framework="pt") as tensors:  # numpy has no bfloat16
                if name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    weight = tensors.get_tensor(name).float().numpy()
                    break
    except (OSError, ValueError, KeyError) as e:
        raise ExportRefused(
            f"the target's final norm cannot be read: {e}",
            where=checkpoint,
            fix="give the target's checkpoint directory, with --checkpoint",
        ) from e
    if weight is None or weight.shape != (hidden,):
        found = "none" if weight is None else f"one of shape {weight.shape}"
        raise ExportRefused(
            f"a final norm of {hidden} channels is wanted, the checkpoint has {found}",
            where=checkpoint,
            fix="give the target's checkpoint directory, with --checkpoint",
        )
    family = str(config.get("model_type", ""))
    factor: NDArray[np.float32] = weight
    dead = int((factor == 0).sum())
    if dead or family.startswith(OFFSET_FAMILIES):
        what = f"switches off {dead} channels" if dead else f"of {family} multiplies by 1 + w"
        raise ExportRefused(
            f"the final norm {what}: it cannot be taken off",
            where=checkpoint,
            fix="export for SpecForge, which takes the final state as it is",
        )
    return factor


def before_norm(final_TH: NDArray[np.uint16], factor_H: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns of final / w, rounded to nearest even, uint16 [T, H]."""
    values = (final_TH.astype(np.uint32) << 16).view(np.float32) / factor_H
    bits: NDArray[np.uint32] = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
