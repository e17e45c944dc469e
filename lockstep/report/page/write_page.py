"""Writes the page: head, sections, style and scripts in one file that needs no network and no server."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from html import escape
from pathlib import Path

from lockstep.errors import BadInput
from lockstep.report.page.curve_section import show_curves
from lockstep.report.page.figure import Figures
from lockstep.report.page.markup import Section
from lockstep.report.page.page_source import PageSource
from lockstep.report.page.part_section import show_layers, show_traffic
from lockstep.report.page.planned_section import show_planned
from lockstep.report.page.predicted_section import show_predicted
from lockstep.report.page.record_section import show_records
from lockstep.report.page.run_section import show_differences, show_left_out, show_runs
from lockstep.report.page.scaling_section import show_scaling
from lockstep.report.page.timeline_section import show_timelines
from lockstep.spec.system import extra_command

# The browser is told to fetch nothing, whatever a script might want.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'"
)


def make_page(source: PageSource, title: str, when: datetime) -> str:
    """The whole page as HTML; a section that nothing has is left out."""
    figures, runs = Figures(), source.runs
    sections = [
        show_runs(runs),
        show_curves(runs, figures),
        show_scaling(runs, source.records, figures),
        show_predicted(runs, figures),
        show_traffic(runs, figures),
        show_planned(source.plans, figures),
        show_layers(runs, figures),
        show_timelines(runs, figures),
        show_differences(runs),
        show_records(source.records, figures),
        show_left_out(source.left_out),
    ]
    title = title or f"Lockstep: {source.count()}"
    scripts = _scripts(figures) if figures.drawn else ()
    return wrap_page(title, _about(source, when), [section for section in sections if section], scripts)


def wrap_page(title: str, about: str, sections: list[Section], scripts: Iterable[str] = ()) -> str:
    """A page of these sections, with its style; it fetches nothing."""
    return "\n".join(
        (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>{_read('page.css')}</style></head><body>",
            f"<header><h1>{escape(title)}</h1><p>{escape(about)}</p>{_contents(sections)}</header><main>",
            *map(_whole, sections),
            "</main>",
            *scripts,
            "</body></html>\n",
        )
    )


def _about(source: PageSource, when: datetime) -> str:
    """What is compared, and when the page was written."""
    trained = sorted({f"{run.setting('model.name')} on {run.setting('data.name')}" for run in source.runs})
    lines = [f"Written {when:%Y-%m-%d %H:%M} UTC. {source.count()}."]
    if trained:
        lines.append(f"Trained: {', '.join(trained[:6])}{' and others' if len(trained) > 6 else ''}.")
    if source.plans:
        names = list(dict.fromkeys(each.name for each in source.plans))
        lines.append(f"Predicted: {'; '.join(names[:6])}{' and others' if len(names) > 6 else ''}.")
    if source.records:
        lines.append(f"Files of records: {len(source.records)}.")
    return " ".join(lines)


def _contents(sections: list[Section]) -> str:
    links = "".join(f'<li><a href="#{each.anchor}">{escape(each.title)}</a></li>' for each in sections)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _whole(section: Section) -> str:
    inside = "".join(part.text for part in section.parts)
    head = f'<h2 id="{section.anchor}-title">{escape(section.title)}</h2>'
    return f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">{head}{inside}</section>'


def _scripts(figures: Figures) -> tuple[str, ...]:
    """Plotly once, the figures, and what draws them."""
    return (
        f"<script>{_plotly()}</script>",
        f'<script type="application/json" id="figures">{figures.as_json()}</script>',
        f"<script>{_read('page.js')}</script>",
    )


def _plotly() -> str:
    """Plotly's script, from the package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise BadInput(
            f"lockstep report draws with plotly, which is missing: {extra_command('report')}"
        ) from None
    return str(get_plotlyjs())


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
