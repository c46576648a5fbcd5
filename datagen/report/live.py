"""Sections about servers: a live sitting, a grid of draft settings, break-even by concurrency."""

from __future__ import annotations

from typing import Any

from datagen.report.plots import Rule, Series, line_plot
from datagen.report.sections import Plot, Section, Table, interval_text

SIDES = ["setting", "baseline", "with the drafter"]


def live_section(live: dict[str, Any]) -> Section:
    """Speeds, slices and servers of a sitting."""
    rows = [
        [str(s["concurrency"]), f"{s['baseline_tokens_per_s']:.1f}", f"{s['speculative_tokens_per_s']:.1f}",
         f"{s['speedup']:.2f}x", f"{s['cycle_ms']:.1f}", f"{s['baseline_throughput']:.1f}",
         f"{s['speculative_throughput']:.1f}"]
        for s in live["speeds"]
    ]  # fmt: skip
    heads = ["concurrency", "baseline tok/s", "with the drafter", "ratio", "cycle ms",
             "baseline, all requests", "with the drafter, all"]  # fmt: skip
    names = sorted({n for s in live["servers"].values() for n in s})
    servers = [
        [n, *(str(live["servers"][s].get(n, "")) for s in ("baseline", "speculative"))]
        for n in names
    ]
    total = live["same_outputs"] + len(live["different_outputs"])
    text = [
        (
            f"Live accept_len {interval_text(live['accept_len'])}; with drafts accepted beyond the end of "
            f"outputs (accept_len_raw) {live['accept_len_raw']:.3f}. Greedy outputs are the same with and "
            f"without the drafter for {live['same_outputs']} of {total} prompts."
        ),
        "Baseline and drafter took turns on the same prompts in one sitting.",
    ]
    points = [
        Series("baseline", tuple((s["concurrency"], s["baseline_tokens_per_s"]) for s in live["speeds"])),
        Series("with the drafter",
               tuple((s["concurrency"], s["speculative_tokens_per_s"]) for s in live["speeds"])),
    ]  # fmt: skip
    plots = []
    if len(live["speeds"]) > 1:
        svg = line_plot(
            "Tokens/s of one request", points, x="concurrency", y="tokens/s", zero_y=True
        )
        plots.append(Plot(svg, rows, heads))
    tables = [Table("", heads, rows), Table("Servers", SIDES, servers)]
    environments = live.get("environments") or {}
    set_there = sorted({n for e in environments.values() if e for n in e})
    if set_there:
        tables.append(Table("Environment of the servers", SIDES, [
            [n, *("unreadable" if environments[s] is None else environments[s].get(n, "")
                  for s in ("baseline", "speculative"))] for n in set_there
        ]))  # fmt: skip
    elif environments:
        text.append("Nothing that matters is set in the servers' environment, as far as it can be "
                    "read from here.")  # fmt: skip
    if live.get("baseline_drift"):
        text.append(f"The baseline's last pass ran at {live['baseline_drift']:.3f}x its first.")
    sliced = [
        [name, value, str(found["n_prompts"]), interval_text(found)]
        for name, values in (live.get("slices") or {}).items() if len(values) > 1
        for value, found in values.items()
    ]  # fmt: skip
    if sliced:
        tables.append(
            Table("Live accept_len by slice", ["slice", "value", "prompts", "accept_len"], sliced)
        )
    return Section("Live", text, tables, plots)


def grid_section(grid: dict[str, Any]) -> Section:
    """Every setting at every concurrency, beside the baseline measured with it."""
    heads = ["setting", "K / topk / draft tokens", "concurrency", "accept_len", "replayed", "tok/s",
             "baseline", "ratio", "cycle ms", "accept_len to break even"]  # fmt: skip
    rows, lines, failed = [], [], []
    for row in grid["settings"]:
        if "error" in row:
            failed.append([row["name"], f"not measured: {row['error']}"])
            continue
        replayed = row["replay_accept_len"]
        for speed in row["speeds"]:
            needed = speed["baseline_tokens_per_s"] * speed["cycle_ms"] / 1000
            rows.append([
                row["name"], f"{row['steps']} / {row['topk']} / {row['draft_tokens']}",
                str(speed["concurrency"]), interval_text(row["accept_len"]),
                interval_text(replayed) if replayed else "a tree has none",
                f"{speed['speculative_tokens_per_s']:.1f}", f"{speed['baseline_tokens_per_s']:.1f}",
                f"{speed['speedup']:.2f}x", f"{speed['cycle_ms']:.1f}", f"{needed:.2f}",
            ])  # fmt: skip
        points = tuple((float(s["concurrency"]), float(s["speedup"])) for s in row["speeds"])
        lines.append(Series(row["name"], points, marked=len(points) == 1))
    tables = [Table("", heads, rows)]
    if failed:
        tables.append(Table("Settings that could not be measured", ["setting", "why"], failed))
    best = ", ".join(
        f"{b['name']} ({b['speedup']:.2f}x) at {b['concurrency']}" for b in grid["best"]
    )
    how = "took turns" if grid["together"] else "ran one at a time, the baseline before and after"
    plot = line_plot(
        "Speed with the drafter / without, by setting", lines, x="concurrency", y="ratio",
        rules=[Rule("break-even", 1.0)],
    )  # fmt: skip
    figures = [[r[0], r[2], r[7]] for r in rows]
    return Section(
        "Grid of draft settings",
        text=[f"Best by concurrency: {best}. Baseline and drafter {how}."],
        tables=tables,
        plots=[Plot(plot, figures, ["setting", "concurrency", "ratio"])],
    )


def by_batch_section(evaluation: dict[str, Any]) -> Section:
    """What break-even takes at each concurrency: cycles grow with the batch, and baselines fall."""
    found, steps = evaluation["replay"]["accept_len"]["value"], evaluation["replay"]["steps"]
    rows, points = [], []
    for even in evaluation["break_even_by_batch"]:
        (first, *_) = even["requirements"]
        p = first["acceptance"]
        rows.append([
            str(even["batch"]), f"{even['baseline']:.1f}", f"{even['cycle_ms']:.1f}",
            f"{first['accept_len']:.2f}", "unreachable" if p is None else f"{p:.0%}",
            "pays" if found > first["accept_len"] else "does not pay",
        ])  # fmt: skip
        points.append((float(even["batch"]), float(first["accept_len"])))
    plot = line_plot(
        "accept_len to break even, by concurrency", [Series("to break even", tuple(points))],
        x="concurrency", y="accept_len",
        rules=[Rule("this drafter", found), Rule(f"most at K = {steps}", steps + 1.0)],
    )  # fmt: skip
    heads = ["concurrency", "baseline tok/s", "cycle ms", "accept_len to break even",
             f"acceptance, K = {steps}", f"at accept_len {found:.2f}"]  # fmt: skip
    return Section("Break-even by concurrency", plots=[Plot(plot, rows, heads)],
                   tables=[Table("", heads, rows)])  # fmt: skip
