"""A card as one self-contained HTML page, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from datagen.prompts.estimate import Speed
from datagen.report.card import Card, run_card
from datagen.report.sections import Table
from datagen.store.atomic import write_atomic

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667; --paper: #fff; --line: #d6dae0;
  --a: #2463b0; --b: #c2571a; --c: #2e8b57; --d: #7d4fb3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3ad; --paper: #14171b;
  --line: #333a42; --a: #6aa5ee; --b: #ef9a63; --c: #6cc796; --d: #b795e6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { font-size: 1.15rem; border-left: 4px solid var(--a); padding: .4rem 1rem; }
table { border-collapse: collapse; margin: .8rem 0; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: break-word; }
th { color: var(--dim); font-weight: 600; }
svg.plot { width: 100%; max-width: 46rem; height: auto; display: block; margin: 1rem 0; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg text.small, svg text.label { fill: var(--dim); } svg text.head { font-size: 13px; font-weight: 600; }
svg line.axis { stroke: var(--dim); } svg line.grid { stroke: var(--line); stroke-width: .6; }
svg line.rule { stroke: var(--ink); stroke-dasharray: 5 4; }
svg polyline { fill: none; stroke-width: 2; }
svg .s0 { stroke: var(--a); } svg circle.s0, svg rect.s0 { fill: var(--a); } svg text.t0 { fill: var(--a); }
svg .s1 { stroke: var(--b); } svg circle.s1 { fill: var(--b); } svg text.t1 { fill: var(--b); }
svg .s2 { stroke: var(--c); } svg circle.s2 { fill: var(--c); } svg text.t2 { fill: var(--c); }
svg .s3 { stroke: var(--d); } svg circle.s3 { fill: var(--d); } svg text.t3 { fill: var(--d); }
"""


def write_report(root: Path, speed: Speed | None = None) -> tuple[Path, Path]:
    """Write report.html and report.md of a run; returns their paths. Raises CorruptFile."""
    card = run_card(root, speed)
    html, markdown = root / "report.html", root / "report.md"
    write_atomic(html, as_html(card).encode())
    write_atomic(markdown, as_markdown(card).encode())
    return html, markdown


def as_html(card: Card) -> str:
    """One page: no script, no link, no font, no image but its own SVG."""
    parts = [f"<h1>{escape(card.title)}</h1>", f'<p class="verdict">{escape(card.verdict)}</p>',
             f"<p>Next: {escape(card.next_step)}</p>"]  # fmt: skip
    for section in card.sections:
        parts.append(f"<section><h2>{escape(section.title)}</h2>")
        parts += [f"<p>{escape(text)}</p>" for text in section.text]
        parts += [_html_table(table) for table in section.tables]
        parts += [f"<figure>{plot.svg}</figure>" for plot in section.plots]
        parts.append("</section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(card.title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def as_markdown(card: Card) -> str:
    """The same figures, plots as tables."""
    parts = [f"# {card.title}", f"**{card.verdict}**", f"Next: {card.next_step}"]
    for section in card.sections:
        parts += [f"## {section.title}", *section.text]
        for table in section.tables:
            if table.title:
                parts.append(f"**{table.title}**")
            parts.append(_markdown_table(table.heads, table.rows))
        parts += [_markdown_table(plot.heads, plot.rows) for plot in section.plots]
    return "\n\n".join(parts) + "\n"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in table.heads)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, rows)])
