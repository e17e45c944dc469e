"""Benchmark records: a table for each file, and bars with their spread where several share a unit."""

from __future__ import annotations

from lockstep.report.page.figure import Figures, PlotSpec, list_axis, list_height, make_axis
from lockstep.report.page.markup import (
    Cell,
    Html,
    Section,
    fold_away,
    html_table,
    show_number,
    write_code,
    write_heading,
)
from lockstep.spec.record import Record


def show_records(files: dict[str, list[Record]], figures: Figures) -> Section | None:
    """All files, each with its plots and, beneath them, its table."""
    section = Section("records", "Benchmark records")
    for name, records in files.items():
        section.add(write_heading(name))
        for unit in dict.fromkeys(record.unit for record in records):
            own = [record for record in records if record.unit == unit]
            if len(own) > 1 and any(record.value for record in own):
                section.add(_bars(name, unit, own, figures))
        section.add(_table(name, records))
    return section if section.parts else None


def _table(name: str, records: list[Record]) -> Html:
    """What was measured; beneath, how."""
    rows: list[tuple[Cell, ...]] = [
        (
            record.name,
            show_number(record.value, unit=record.unit),
            record.n,
            show_number(record.spread[0]),
            show_number(record.spread[1]),
        )
        for record in records
    ]
    how = {(record.hardware, record.commit, record.command): None for record in records}
    means = [(hardware, write_code(commit), write_code(command)) for hardware, commit, command in how]
    values = html_table(f"Records of {name}", ("what", "value", "n", "lowest", "highest"), rows)
    by = html_table(f"How {name} was measured", ("hardware", "commit", "command"), means)
    return Html(values.text + fold_away("How it was measured", by).text)


def _bars(name: str, unit: str, records: list[Record], figures: Figures) -> Html:
    """A bar a record, with a line from its lowest to its highest value."""
    values = [record.value for record in records]
    names = [record.name for record in records]
    trace = {
        "type": "bar",
        "orientation": "h",
        "name": unit,
        "showlegend": False,
        "marker": {"color": "c0"},
        "x": values,
        "y": list(range(len(records))),
        "customdata": names,
        "hovertemplate": "%{customdata}: %{x:.5g}<extra></extra>",
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [max(record.spread[1] - record.value, 0) for record in records],
            "arrayminus": [max(record.value - record.spread[0], 0) for record in records],
            "color": "ink",
            "thickness": 1,
            "width": 3,
        },
    }
    title = f"{name}: {unit}"
    layout = {"xaxis": make_axis(unit), "yaxis": list_axis(names)}
    says = f"Bars of {len(records)} records in {unit}, each with its spread."
    return figures.place(PlotSpec(title, says, [trace], layout, list_height(len(records))))
