"""Can the full training run reach break-even? Trains short, on nested subsets, and extrapolates.

The init drafter is scored first, untouched; then one drafter per subset is trained with the run's own
settings and replayed on the held-out split; a saturating fit over the sizes answers. Every subset's
drafter and evaluation stay on disk, so that the probe resumes itself and the report shows its curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datagen.acceptance.breakeven import required_accept_len
from datagen.acceptance.scaling import Point, ScalingFit
from datagen.errors import ConfigError
from datagen.evaluate.config import EvaluateConfig, evaluate_config
from datagen.evaluate.job import evaluate
from datagen.finetune import FinetuneConfig, finetune
from datagen.prompts.estimate import Speed
from datagen.report.price import price
from datagen.store.atomic import write_json_atomic
from datagen.store.manifest import Manifest

Notify = Callable[[str], None]
FRACTIONS = (1 / 16, 1 / 8, 1 / 4)
Z_95 = 1.959963984540054


def probe(
    training: FinetuneConfig, *, steps: int, baseline: float, cycle_ms: float, notify: Notify,
    fractions: Sequence[float] = FRACTIONS, speed: Speed | None = None,
    stop: Callable[[], bool] = lambda: False, **evaluation: Any,
) -> dict[str, Any]:  # fmt: skip
    """Writes probe.json beside the manifest; returns it. Raises DatagenError.

    training     as of the full run; its `out` is where the subsets' drafters go, a directory each
    fractions    of the training samples, three at least
    speed        of the servers that would collect, for the cost; None: the run's own pace
    evaluation   further settings of an evaluation, as device, target_weights
    """
    manifest = training.manifests[0]
    total = training.train.limit or Manifest.load(manifest).splits["train"].samples.collected
    sizes = sorted({max(round(total * f), 1) for f in fractions})
    if len(sizes) < 3 or sizes[-1] > total:
        raise ConfigError(
            f"{total} training samples give the sizes {sizes}: a curve needs three, none above the whole",
            where=manifest, fix="collect more, or give other fractions",
        )  # fmt: skip
    needed = max(required_accept_len(baseline, cycle_ms), 1.0)

    def measured(drafter: Path, name: str) -> dict[str, Any]:
        given = {"steps": steps, "baseline": baseline, "cycle_ms": cycle_ms, **evaluation}
        config: EvaluateConfig = evaluate_config(
            manifest=str(manifest), drafter=str(drafter), name=name, **given
        )
        found: dict[str, Any] = evaluate(config, notify, stop)["replay"]["accept_len"]
        return found

    before = measured(training.init, "probe-init") if training.init else None
    points, curve = [], []
    for size in sizes:
        train = training.train.model_copy(update={"limit": size})
        subset = training.model_copy(update={"train": train, "out": training.out / f"n{size}"})
        notify(f"training on {size:,} of {total:,} samples")
        final = finetune(subset, notify, stop).final
        found = measured(Path(final), f"probe-{size}")
        sd = (found["high"] - found["low"]) / 2 / Z_95 if found["low"] is not None else None
        points.append(Point(size, found["value"], sd if sd else None))
        curve.append({"samples": size, "accept_len": found})
    fit = ScalingFit(points, steps=steps)
    whole, goal = fit.forecast(total), fit.goal(needed)
    whole_manifest = Manifest.load(manifest)
    wanted = {"full run": float(total), "break-even": goal.samples.value}
    costs = {name: price(n, manifest.parent, whole_manifest, speed)
             for name, n in wanted.items() if n is not None}  # fmt: skip
    result = {
        "manifest": str(manifest), "steps": steps, "init": before, "curve": curve,
        "samples": total, "needed": needed, "forecast": asdict(whole), "goal": asdict(goal),
        "cost": {name: asdict(cost) for name, cost in costs.items()},
        "sentence": " ".join([
            _sentence(total, needed, whole.value, whole.low, whole.high, goal.answer),
            *(f"For {name}: {cost}." for name, cost in costs.items()),
        ]),
    }  # fmt: skip
    write_json_atomic(manifest.parent / "probe.json", result)
    notify(str(result["sentence"]))
    return result


def _sentence(
    total: int,
    needed: float,
    value: float | None,
    low: float | None,
    high: float | None,
    answer: str,
) -> str:
    shown = f"{value:.2f}" + (
        f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else " (no interval)"
    )
    if low is not None and low >= needed:
        lead = f"The full run of {total:,} samples can be expected to reach break-even"
    elif high is not None and high < needed:
        lead = f"The full run of {total:,} samples cannot be expected to reach break-even"
    else:
        lead = f"Whether the full run of {total:,} samples reaches break-even is open"
    return f"{lead}: accept_len {shown} forecast, {needed:.2f} needed; for that, {answer}."
