"""Loss and held-out acceptance of a training run: its metrics.jsonl, read and drawn as an SVG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, MARGIN = 360, 220, 40
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
Line = tuple[str, list[tuple[float, float]]]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole record of a metrics.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curves_svg(records: Sequence[dict[str, Any]]) -> str:
    """Three panels side by side: loss, predicted_accept_len, conditional acceptance by depth."""
    loss = [(float(r["step"]), float(r["loss"])) for r in records if r["kind"] == "train"]
    held = [r for r in records if r["kind"] == "heldout"]
    length = [(float(r["step"]), float(r["predicted_accept_len"])) for r in held]
    depths = len(held[0]["conditional_acceptance"]) if held else 0
    by_depth: list[Line] = [
        (
            f"depth {k + 1}",
            [(float(r["step"]), float(r["conditional_acceptance"][k])) for r in held],
        )
        for k in range(depths)
    ]
    panels = [
        _panel(0, "training loss", [("loss", loss)]),
        _panel(1, "held-out predicted_accept_len", [("predicted_accept_len", length)]),
        _panel(2, "held-out conditional acceptance", by_depth),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">{"".join(panels)}</svg>\n'
    )


def write_curves(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the SVG."""
    path.write_text(curves_svg(records), encoding="utf-8")


def _panel(number: int, title: str, lines: Sequence[Line]) -> str:
    points = [p for _, line in lines for p in line]
    parts = [f'<text x="{MARGIN}" y="16" font-weight="bold">{title}</text>']
    if points:
        x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
        y0, y1 = min(y for _, y in points), max(y for _, y in points)
        x_scale = (WIDTH - 2 * MARGIN) / ((x1 - x0) or 1.0)
        y_scale = (HEIGHT - 2 * MARGIN) / ((y1 - y0) or 1.0)
        bottom = HEIGHT - MARGIN
        parts += [
            f'<path d="M{MARGIN},{MARGIN - 10}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="#999"/>',
            f'<text x="4" y="{bottom}">{y0:.3g}</text><text x="4" y="{MARGIN}">{y1:.3g}</text>',
            f'<text x="{MARGIN}" y="{HEIGHT - 22}">{x0:g}</text>',
            f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 22}" text-anchor="end">step {x1:g}</text>',
        ]
        for i, (name, line) in enumerate(lines):
            colour = COLOURS[i % len(COLOURS)]
            placed = " ".join(
                f"{MARGIN + (x - x0) * x_scale:.1f},{bottom - (y - y0) * y_scale:.1f}"
                for x, y in line
            )
            parts.append(
                f'<polyline points="{placed}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
            if len(lines) > 1:
                parts.append(
                    f'<text x="{MARGIN + 60 * i}" y="{HEIGHT - 6}" fill="{colour}">{name}</text>'
                )
    return f'<g transform="translate({number * WIDTH},0)">{"".join(parts)}</g>'
