"""The settings of an evaluation, from flat scalars as a CLI, a Makefile or a UI form gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from datagen.acceptance.grid import Grid, load_grid
from datagen.errors import ConfigError
from datagen.strict import StrictModel, parse

EMBEDDED = "embedded"


class EvaluateConfig(StrictModel):
    """Everything that `datagen evaluate` needs."""

    manifest: Path
    drafter: Path
    against: Path | None = None
    """Another drafter, compared on the same samples."""
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    target: str | None = None
    """The target's profile, for captures; None: the manifest's."""
    target_weights: Path | None = None
    split: str = "heldout"
    steps: int = Field(default=3, ge=1, le=16)
    limit: int = Field(default=0, ge=0)
    device: str = "auto"
    dtype: str = "float32"
    live: str | None = None
    """URL of a server with the drafter, or `embedded`: both servers are started here."""
    live_dtype: str = "bfloat16"
    baseline_url: str | None = None
    grid: Grid | None = None
    """Further servers, each measured beside the baseline."""
    concurrencies: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1,), min_length=1)
    rounds: int = Field(default=2, ge=1)
    live_prompts: int = Field(default=50, ge=1)
    baseline: float | None = Field(default=None, gt=0)
    cycle_ms: float | None = Field(default=None, gt=0)
    targets: tuple[float, ...] = ()


def evaluate_config(
    *,
    manifest: str = "runs/demo/manifest.json",
    drafter: str = "",
    against: str = "",
    name: str = "",
    target: str = "",
    target_weights: str = "",
    concurrencies: str = "1",
    targets: str = "",
    live: str = "",
    baseline_url: str = "",
    grid: str = "",
    baseline: float = 0.0,
    cycle_ms: float = 0.0,
    **settings: Any,
) -> EvaluateConfig:
    """From flat scalars. `drafter`: empty is drafter/finetuned/final beside the manifest.

    Raises ConfigError.
    """
    path = Path(manifest)
    path = path / "manifest.json" if path.is_dir() else path
    checkpoint = Path(drafter) if drafter else path.parent / "drafter" / "finetuned" / "final"
    if (checkpoint / "final" / "config.json").exists():
        checkpoint = checkpoint / "final"
    if live != EMBEDDED and bool(live) != bool(baseline_url):
        raise ConfigError(
            "a live measurement needs two servers: with the drafter, and without",
            fix="give --live and --baseline-url, or --live embedded",
        )
    if bool(baseline) != bool(cycle_ms):
        raise ConfigError("break-even needs both figures", fix="give --baseline and --cycle-ms")
    parts = [p for p in checkpoint.resolve().parts if p not in ("final", "drafter")]
    try:
        lists = {
            "concurrencies": [int(c) for c in concurrencies.split(",") if c.strip()],
            "targets": [float(t) for t in targets.split(",") if t.strip()],
        }
    except ValueError as e:
        raise ConfigError(f"not a list of numbers: {e}", fix="write 1,8,32") from e
    return parse(
        {
            "manifest": path, "drafter": checkpoint, "against": against or None,
            "name": name or parts[-1], "target": target or None,
            "target_weights": target_weights or None, "live": live or None,
            "baseline_url": baseline_url or None, "grid": load_grid(grid) if grid else None,
            "baseline": baseline or None, "cycle_ms": cycle_ms or None, **lists, **settings,
        },
        EvaluateConfig,
        where="evaluate settings",
    )  # fmt: skip
