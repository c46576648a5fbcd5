"""The parts a run card is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under heads; `title` may be empty."""

    title: str
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """An SVG, and the figures in it as a table, which Markdown shows instead."""

    svg: str
    rows: list[list[str]]
    heads: list[str]


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part: text, then tables, then plots."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)


def text_of(value: Any, length: int = 200) -> str:
    """A value on one line, cut."""
    text = " ".join(str(value).split())
    return text if len(text) <= length else text[:length] + "..."


def interval_text(found: dict[str, Any]) -> str:
    """`2.10 [2.01, 2.19]` of a stored interval."""
    if found["low"] is None:
        return f"{found['value']:.3f}"
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
