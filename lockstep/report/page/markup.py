"""Pieces of HTML: every text is escaped here, every number keeps its exact value beside what is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

_SIDE_BY_SIDE = 6  # columns of runs in one table: more would not fit on paper


@dataclass(frozen=True)
class Html:
    """Text that is HTML already."""

    text: str


@dataclass(frozen=True)
class Quantity:
    """A number as people read it, with its exact value."""

    value: float
    shown: str


Cell = Html | Quantity | str | int | None


@dataclass(frozen=True)
class Section:
    """A part of the page, with a heading and an anchor."""

    anchor: str
    title: str
    parts: list[Html] = field(default_factory=list)

    def add(self, *parts: Html) -> None:
        self.parts.extend(parts)


def show_number(value: float | None, digits: int = 4, unit: str = "", factor: float = 1.0) -> Cell:
    """A number with so many significant digits and its unit; an empty cell for None."""
    if value is None:
        return None
    shown = round_digits(value * factor, digits)
    return Quantity(value, f"{shown} {unit}".strip())


def show_ms(seconds: float) -> Cell:
    """Seconds as milliseconds; the exact value stays in seconds."""
    return show_number(seconds, unit="ms", factor=1e3)


def round_digits(value: float, digits: int = 4) -> str:
    """12,345.678 as 12,346 and 0.00012345 as 0.0001234, without powers of ten in between."""
    if not math.isfinite(value):
        return str(value)
    if not value:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -6 <= size < 15:
        return f"{value:.{digits}g}"
    places = max(digits - 1 - size, 0)
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def show_share(share: float | None) -> Cell:
    """A share of 1 as a percentage with two places."""
    return None if share is None else Quantity(share, f"{100 * share:.2f} %")


def write_text(text: str) -> Html:
    """Plain text."""
    return Html(f"<p>{escape(text)}</p>")


def write_list(lines: Iterable[str]) -> Html:
    """Plain texts, each with a dot before it."""
    return Html(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")


def write_heading(text: str) -> Html:
    """Of a part of a section."""
    return Html(f"<h3>{escape(text)}</h3>")


def write_code(text: str) -> Html:
    """In a fixed font."""
    return Html(f"<code>{escape(text)}</code>")


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Html:
    """A table in a box that scrolls by itself; the first cell of a row is its heading."""
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    label = escape(caption, quote=True)
    return Html(
        f'<div class="box" role="region" aria-label="{label}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def tables_of_runs(
    caption: str, corner: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]]
) -> Html:
    """A row a key and a column a run; many runs make several tables. Rows without a value are left out."""
    num_tables = -(-len(names) // _SIDE_BY_SIDE)
    ends = [len(names) * place // num_tables for place in range(num_tables + 1)]
    parts = []
    for start, end in pairwise(ends):
        few = [
            (key, *row[start:end]) for key, row in rows if any(cell is not None for cell in row[start:end])
        ]
        more = f", {start + 1} to {end} of {len(names)}" if num_tables > 1 else ""
        parts.append(html_table(caption + more, [corner, *names[start:end]], few))
    return Html("".join(part.text for part in parts))


def fold_away(title: str, *parts: Html) -> Html:
    """Parts that open by a click, without any script; on paper they are open."""
    inside = "".join(part.text for part in parts)
    return Html(f"<details><summary>{escape(title)}</summary>{inside}</details>")


def _row(cells: Sequence[Cell]) -> str:
    first, *others = cells
    return f'<th scope="row">{_inside(first)}</th>' + "".join(map(_cell, others))


def _cell(cell: Cell) -> str:
    kind = ' class="number"' if isinstance(cell, Quantity | int) else ""
    return f"<td{kind}>{_inside(cell)}</td>"


def _inside(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Html):
        return cell.text
    if isinstance(cell, Quantity):
        return f'<data value="{cell.value!r}">{escape(cell.shown)}</data>'
    return escape(f"{cell:,}" if type(cell) is int else str(cell))
