"""The page of a run's wrong predictions: which classes are confused, and the images, most confident first.

`lockstep eval --wrong` hands over plain values; every image is a small JPEG within the page.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lockstep.report.page.markup import Cell, Html, Section, html_table, show_share, write_heading, write_text
from lockstep.report.page.write_page import wrap_page

_LONGEST = 48  # letters of a file's name


@dataclass(frozen=True)
class ShownMistake:
    """A wrong prediction: its image as JPEG, the names of the two classes, and how probable each was."""

    jpeg: bytes
    name: str
    label: str
    predicted: str
    confidence: float
    of_label: float


@dataclass(frozen=True)
class ShownPair:
    """Images of one class that were taken for another, and some of them."""

    label: str
    predicted: str
    count: int
    samples: int  # of the class
    examples: Sequence[ShownMistake]


def make_mistake_page(
    title: str,
    about: str,
    pairs: Sequence[ShownPair],
    mistakes: Sequence[ShownMistake],
    classes: Sequence[dict[str, Any]],
) -> str:
    """The page as HTML; without a mistake it has the table of classes alone."""
    sections = [
        *([_show_pairs(pairs)] if pairs else []),
        *([_show_mistakes(mistakes)] if mistakes else []),
        _show_classes(classes),
    ]
    return wrap_page(title, about, sections)


def _show_pairs(pairs: Sequence[ShownPair]) -> Section:
    section = Section("pairs", "Most confused pairs")
    rows: list[list[Cell]] = [
        [pair.label, pair.predicted, pair.count, show_share(pair.count / pair.samples)] for pair in pairs
    ]
    head = ("labelled", "taken for", "images", "share of the class")
    section.add(html_table("Pairs of classes, the most images first", head, rows))
    for pair in (pair for pair in pairs if pair.examples):
        section.add(write_heading(f"{pair.label} taken for {pair.predicted}: {pair.count:,}"))
        section.add(_gallery(pair.examples, with_classes=False))
    return section


def _show_mistakes(mistakes: Sequence[ShownMistake]) -> Section:
    section = Section("wrong", "Most confident wrong predictions")
    section.add(write_text("Below an image: how sure the model was, and what it gave the label."))
    section.add(_gallery(mistakes, with_classes=True))
    return section


def _show_classes(classes: Sequence[dict[str, Any]]) -> Section:
    """A row a class, the worst first."""
    section = Section("classes", "By class")
    ordered = sorted(classes, key=lambda row: 1.0 if row["accuracy"] is None else row["accuracy"])
    rows: list[list[Cell]] = [
        [row["class"], row["samples"], show_share(row["accuracy"]), row["mistaken_for"]] for row in ordered
    ]
    head = ("class", "images", "accuracy", "most often taken for")
    section.add(html_table("Classes, the worst first", head, rows))
    return section


def _gallery(mistakes: Sequence[ShownMistake], with_classes: bool) -> Html:
    return Html(f'<ul class="gallery">{"".join(_item(each, with_classes) for each in mistakes)}</ul>')


def _item(mistake: ShownMistake, with_classes: bool) -> str:
    """An image and what was said of it; a screen reader is told the classes."""
    says = f"{mistake.label} taken for {mistake.predicted}"
    source = f"data:image/jpeg;base64,{b64encode(mistake.jpeg).decode()}"
    lines = [f"{_percent(mistake.confidence)} (label {_percent(mistake.of_label)})"]
    if with_classes:
        lines.insert(0, says)
    short = mistake.name if len(mistake.name) <= _LONGEST else f"…{mistake.name[1 - _LONGEST :]}"
    texts = "".join(f"<span>{escape(line)}</span>" for line in lines)
    return (
        f'<li><img src="{source}" alt="{escape(says, quote=True)}">{texts}'
        f'<span class="name" title="{escape(mistake.name, quote=True)}">{escape(short)}</span></li>'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
