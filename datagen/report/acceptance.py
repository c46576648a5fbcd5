"""Sections about drafters: accept_len and its slices, break-even, live speed, scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datagen.acceptance.breakeven import chain_accept_len, chain_acceptance, required_accept_len
from datagen.acceptance.scaling import NotIdentifiable, Point, ScalingFit
from datagen.prompts.estimate import Speed
from datagen.report.live import by_batch_section, grid_section, live_section
from datagen.report.plots import Rule, Series, bar_plot, interval_plot, line_plot
from datagen.report.price import price
from datagen.report.sections import Plot, Section, Table, interval_text
from datagen.store.manifest import Manifest

SLICES_SHOWN = 24
Z_95 = 1.959963984540054


def evaluation_sections(evaluation: dict[str, Any]) -> list[Section]:
    """Everything one evaluation measured."""
    found = [_acceptance(evaluation), _slices(evaluation)]
    if "live" in evaluation:
        found.append(live_section(evaluation["live"]))
    if "grid" in evaluation:
        found.append(grid_section(evaluation["grid"]))
    if "break_even" in evaluation:
        found.append(_break_even(evaluation))
    if len(evaluation.get("break_even_by_batch", ())) > 1:
        found.append(by_batch_section(evaluation))
    return found


def _acceptance(evaluation: dict[str, Any]) -> Section:
    replay, split, drafter = evaluation["replay"], evaluation["split"], evaluation["drafter"]
    trained = drafter.get("trained_samples")
    rows = [
        ["accept_len", interval_text(replay["accept_len"])],
        ["draft tokens a cycle, K", str(replay["steps"])],
        ["verify steps / tokens", f"{replay['verify_steps']:,} / {replay['tokens']:,}"],
        ["held-out", f"{split['prompts']:,} prompts, {split['samples']:,} samples ({split['name']})"],
        ["disjoint from the training data", split["disjoint_from_training"]],
        ["drafter", f"{drafter['path']} (sha256 {drafter['sha256'][:16]})"],
        ["trained on", f"{trained:,} samples" if trained is not None else "unstated"],
        ["uncut steps would deliver", f"{replay['predicted_accept_len']:.3f}"],
        ["responses that loop", (f"{replay['looping_share']:.1%} (distinct 4-grams "
                                f"{replay['mean_distinct_4']:.1%} on average)")],
        ["arithmetic", f"{replay['dtype']}, replayed in {replay['seconds']:,.1f} s"],
    ]  # fmt: skip
    if sampled := replay.get("expected"):
        rows.append([
            "uncut steps, expected before the draw",
            (f"{sampled['expected']:.3f} +- {1.96 * sampled['expected_error']:.3f} (as drawn "
            f"{sampled['observed']:.3f} +- {1.96 * sampled['observed_error']:.3f})"),
        ])  # fmt: skip
    if "comparison" in evaluation:
        about = evaluation["comparison"]
        rows.append([f"against {about['against']['path']}", about["text"]])
    if "parity" in evaluation:
        p = evaluation["parity"]
        rows.append(
            ["replay of the live outputs", (f"{p['replay_steps']:,} verify steps, live "
             f"{p['live_steps']:,}; {len(p['differ'])} of {p['samples']} samples differ")]
        )  # fmt: skip
    bars = [
        (f"draft {j}", 0.0 if a is None else float(a))
        for j, a in enumerate(replay["conditional_acceptance"], 1)
    ]
    plot = bar_plot("Acceptance of each draft token, given those before", bars, y="acceptance")
    return Section(
        f"Drafter {evaluation['name']}: accept_len",
        text=[evaluation["verdict"]["sentence"]],
        tables=[Table("", ["what", "value"], rows)],
        plots=[Plot(plot, [[n, f"{v:.1%}"] for n, v in bars], ["draft token", "acceptance"])],
    )


def _slices(evaluation: dict[str, Any]) -> Section:
    rows, table = [], []
    for name, values in evaluation["replay"]["slices"].items():
        if len(values) < 2:
            continue
        for value, found in values.items():
            rows.append((f"{name}: {value}", found["value"], found["low"], found["high"]))
            table.append([name, value, str(found["n_prompts"]), interval_text(found)])
    overall = evaluation["replay"]["accept_len"]["value"]
    if not rows:
        return Section("accept_len by slice", text=["The held-out prompts are of one kind."])
    plot = interval_plot(
        "accept_len by slice, 95 % intervals", rows[:SLICES_SHOWN], x="accept_len",
        rule=Rule("all", overall),
    )  # fmt: skip
    heads = ["slice", "value", "prompts", "accept_len"]
    return Section("accept_len by slice", plots=[Plot(plot, table, heads)],
                   tables=[Table("", heads, table)] if len(table) > SLICES_SHOWN else [])  # fmt: skip


def _break_even(evaluation: dict[str, Any]) -> Section:
    even, replay = evaluation["break_even"], evaluation["replay"]
    steps, found = even["steps"], replay["accept_len"]["value"]
    heads = [
        "for",
        "tok/s",
        "accept_len",
        "acceptance, endless chain",
        f"acceptance, K = {steps}",
        "smallest K",
    ]
    rows = [
        [r["name"], f"{r['tokens_per_s']:.1f}", f"{r['accept_len']:.2f}", f"{r['geometric_acceptance']:.0%}",
         "unreachable" if r["acceptance"] is None else f"{r['acceptance']:.0%}",
         str(r["smallest_steps"] or "none")]
        for r in even["requirements"]
    ]  # fmt: skip
    grid = [i / 100 for i in range(101)]
    rate = 1000 / even["cycle_ms"]
    lines = [
        Series(f"K = {k}", tuple((p, chain_accept_len(p, k) * rate) for p in grid))
        for k in sorted({steps, steps + 2})
    ]
    here = chain_acceptance(min(max(found, 1.0), steps + 1.0), steps) or 0.0
    lines.append(Series("this drafter", ((here, found * rate),), marked=True))
    chart = line_plot(
        f"Tokens/s against acceptance, cycle {even['cycle_ms']:.1f} ms", lines,
        x="acceptance of each draft token", y="tokens/s",
        rules=[Rule("baseline", even["baseline"])], zero_y=True,
    )  # fmt: skip
    cycles = [even["cycle_ms"] * f / 20 for f in range(10, 41)]
    sensitivity = line_plot(
        "Sensitivity: accept_len to break even against cycle time",
        [
            Series("to break even", tuple((c, required_accept_len(even["baseline"], c)) for c in cycles)),
            Series("this drafter", ((even["cycle_ms"], found),), marked=True),
        ],
        x="cycle time, ms", y="accept_len", rules=[Rule(f"most at K = {steps}", steps + 1.0)],
    )  # fmt: skip
    return Section(
        "Break-even",
        tables=[Table("", heads, rows)],
        plots=[Plot(chart, [["this drafter", f"{here:.1%}", f"{found * rate:.1f}"]],
                    ["", "acceptance", "tokens/s"]),
               Plot(sensitivity, [[f"{c:.1f}", f"{required_accept_len(even['baseline'], c):.2f}"]
                                  for c in cycles[::5]], ["cycle ms", "accept_len to break even"])],
    )  # fmt: skip


def scaling_section(
    evaluations: Sequence[dict[str, Any]], root: Path, manifest: Manifest, speed: Speed | None
) -> list[Section]:
    """accept_len against training samples, over evaluations of one held-out set and one K.

    `speed`: of the servers that would collect more; None prices it at the run's own pace.
    """
    groups: dict[Any, dict[int, dict[str, Any]]] = defaultdict(dict)
    for e in evaluations:
        if e["drafter"].get("trained_samples"):
            key = (e["split"]["prompts_sha256"], e["replay"]["steps"])
            groups[key][e["drafter"]["trained_samples"]] = e
    if not groups:
        return []
    (_, steps), group = max(groups.items(), key=lambda item: len(item[1]))
    points = [
        Point(n, e["replay"]["accept_len"]["value"], _sd(e["replay"]["accept_len"]))
        for n, e in sorted(group.items())
    ]
    table = [
        [f"{p.samples:,}", interval_text(group[p.samples]["replay"]["accept_len"])] for p in points
    ]
    heads = ["training samples", "accept_len"]
    try:
        fit = ScalingFit(points, steps=steps)
    except NotIdentifiable as e:
        return [Section("Scaling with data", text=[str(e)], tables=[Table("", heads, table)])]
    last = points[-1].samples
    sizes = [points[0].samples * (last * 8 / points[0].samples) ** (i / 60) for i in range(61)]
    marked = Series(
        "measured", tuple((float(p.samples), p.accept_len) for p in points), marked=True,
        whiskers=tuple(
            (p.accept_len - Z_95 * p.sd, p.accept_len + Z_95 * p.sd) if p.sd else None
            for p in points
        ),
    )  # fmt: skip
    curve = Series("saturating fit", tuple((n, fit.predict(n)) for n in sizes))
    newest = evaluations[-1]
    text, rules = [], []
    if "break_even" in newest:
        needed = max(newest["break_even"]["requirements"][0]["accept_len"], 1.0)
        goal = fit.goal(needed)
        rules.append(Rule("break-even", needed))
        text.append(f"Samples for break-even ({needed:.2f}): {goal.answer}.")
        if goal.samples.value is not None:
            text.append(f"{price(goal.samples.value, root, manifest, speed)}.")
    ahead = fit.forecast(last * 4)
    if ahead.low is not None and ahead.high is not None:
        text.append(
            f"Forecast at {last * 4:,} samples: {ahead.value:.2f} [{ahead.low:.2f}, {ahead.high:.2f}]."
        )
    svg = line_plot("accept_len against training samples", [curve, marked], x="training samples",
                    y="accept_len", rules=rules, log_x=True)  # fmt: skip
    return [Section("Scaling with data", text=text, plots=[Plot(svg, table, heads)])]


def _sd(found: dict[str, Any]) -> float | None:
    if found["low"] is None or found["high"] is None:
        return None
    return max((float(found["high"]) - float(found["low"])) / 2 / Z_95, 1e-6)
