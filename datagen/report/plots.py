"""Plots as inline SVG, drawn here: the report is one file that needs no network and no script.

Every plot is an <svg class="plot" role="img"> with a title; colours follow the page through CSS classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 300, 62, 44, 30, 16
ROW = 24  # height of a row of an interval plot


@dataclass(frozen=True, slots=True)
class Series:
    """Points joined by a line, or marked alone. `whiskers`: (low, high) per point."""

    name: str
    points: tuple[tuple[float, float], ...]
    marked: bool = False
    whiskers: tuple[tuple[float, float] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A dashed line across the plot, at a value of x or of y."""

    name: str
    value: float
    vertical: bool = False


def line_plot(
    title: str, series: Sequence[Series], *, x: str, y: str, rules: Sequence[Rule] = (),
    log_x: bool = False, zero_y: bool = False,
) -> str:  # fmt: skip
    """Lines and points over common axes."""
    xs = [p[0] for s in series for p in s.points] + [r.value for r in rules if r.vertical]
    ys = [p[1] for s in series for p in s.points] + [r.value for r in rules if not r.vertical]
    ys += [v for s in series for w in s.whiskers if w for v in w]
    across = _Axis.over(xs, LEFT, WIDTH - RIGHT, log=log_x)
    up = _Axis.over([*ys, 0.0] if zero_y else ys, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(across, up, x, y)]
    for rule in rules:
        at = across(rule.value) if rule.vertical else up(rule.value)
        ends = (at, TOP, at, HEIGHT - BOTTOM) if rule.vertical else (LEFT, at, WIDTH - RIGHT, at)
        parts.append(_line(*ends, css="rule"))
        over, under = (at + 4, TOP + 10.0) if rule.vertical else (LEFT + 4.0, at - 4)
        parts.append(_text(over, under, rule.name, "start", "small"))
    for number, s in enumerate(series):
        css = f"s{number % 4}"
        if not s.marked:
            path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in s.points)
            parts.append(f'<polyline class="{css}" points="{path}"/>')
        else:
            parts += [
                f'<circle class="{css}" cx="{across(a):.1f}" cy="{up(b):.1f}" r="4"/>'
                for a, b in s.points
            ]
        for (a, _), whisker in zip(s.points, s.whiskers, strict=False):
            if whisker:
                parts.append(_line(across(a), up(whisker[0]), across(a), up(whisker[1]), css=css))
        parts.append(
            _text(WIDTH - RIGHT - 4, TOP + 12 + 14 * number, s.name, "end", f"t{number % 4}")
        )
    return _svg(title, HEIGHT, parts)


def interval_plot(
    title: str, rows: Sequence[tuple[str, float, float | None, float | None]], *, x: str,
    rule: Rule | None = None,
) -> str:  # fmt: skip
    """One value and its interval a row."""
    height = TOP + BOTTOM + ROW * len(rows)
    values = [v for _, *three in rows for v in three if v is not None]
    left = 190
    across = _Axis.over([*values, rule.value] if rule else values, left, WIDTH - RIGHT)
    parts = _ticks_across(across, height - BOTTOM, TOP, x, left)
    if rule:
        at = across(rule.value)
        parts.append(_line(at, TOP, at, height - BOTTOM, css="rule"))
        parts.append(_text(at + 4, TOP - 4, rule.name, "start", "small"))
    for number, (name, value, low, high) in enumerate(rows):
        at = TOP + ROW * (number + 0.5)
        parts.append(_text(left - 8, at + 4, name, "end", "small"))
        if low is not None and high is not None:
            parts.append(_line(across(low), at, across(high), at, css="s0"))
        parts.append(f'<circle class="s0" cx="{across(value):.1f}" cy="{at:.1f}" r="4"/>')
    return _svg(title, height, parts)


def bar_plot(title: str, bars: Sequence[tuple[str, float]], *, y: str) -> str:
    """Named bars from zero."""
    up = _Axis.over([0.0, *(v for _, v in bars)], HEIGHT - BOTTOM, TOP)
    parts = _ticks_up(up, y)
    room = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)
    for number, (name, value) in enumerate(bars):
        x, top = LEFT + room * number, up(value)
        parts.append(
            f'<rect class="s0" x="{x + room * 0.1:.1f}" y="{top:.1f}" width="{room * 0.8:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}"/>'
        )
        parts.append(_text(x + room / 2, HEIGHT - BOTTOM + 14, name, "middle", "small"))
    return _svg(title, HEIGHT, parts)


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool = False) -> _Axis:
        found = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        if log:
            low, high = math.log10(min(found)), math.log10(max(found))
            if high - low < 0.2:
                low, high = low - 0.1, high + 0.1
            ticks = tuple(
                m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)
                if low - 0.01 <= math.log10(m * 10.0**e) <= high + 0.01
            )  # fmt: skip
            return cls(low, high, start, end, True, ticks)
        low, high = min(found), max(found)
        if high - low < 1e-9:
            low, high = low - 0.5, high + 0.5
        step = _step((high - low) / 5)
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        count = round((high - low) / step)
        return cls(low, high, start, end, False, tuple(low + step * i for i in range(count + 1)))

    def __call__(self, value: float) -> float:
        v = math.log10(value) if self.log else value
        return self.start + (v - self.low) / (self.high - self.low) * (self.end - self.start)


def _step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def _frame(across: _Axis, up: _Axis, x: str, y: str) -> list[str]:
    return [*_ticks_across(across, HEIGHT - BOTTOM, TOP, x, LEFT), *_ticks_up(up, y)]


def _ticks_across(axis: _Axis, floor: float, top: float, label: str, left: float) -> list[str]:
    parts = [_line(left, floor, WIDTH - RIGHT, floor, css="axis")]
    for tick in axis.ticks:
        parts.append(_line(axis(tick), floor, axis(tick), top, css="grid"))
        parts.append(_text(axis(tick), floor + 14, _number(tick), "middle", "small"))
    return [*parts, _text((left + WIDTH - RIGHT) / 2, floor + 34, label, "middle", "label")]


def _ticks_up(axis: _Axis, label: str) -> list[str]:
    parts = [_line(LEFT, HEIGHT - BOTTOM, LEFT, TOP, css="axis")]
    for tick in axis.ticks:
        parts.append(_line(LEFT, axis(tick), WIDTH - RIGHT, axis(tick), css="grid"))
        parts.append(_text(LEFT - 6, axis(tick) + 4, _number(tick), "end", "small"))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    return [
        *parts,
        (
            f'<text class="label" text-anchor="middle" transform="translate(14 {middle:.0f}) '
            f'rotate(-90)">{escape(label)}</text>'
        ),
    ]


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}K" if abs(value) >= 1e4 else f"{value:.6g}"


def _line(x1: float, y1: float, x2: float, y2: float, *, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, css: str) -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="plot" role="img" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
        f"{_text(LEFT, 16, title, 'start', 'head')}{''.join(parts)}</svg>"
    )
