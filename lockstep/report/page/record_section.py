"""Benchmark records: a table for each file, and bars with their spread where several share a unit."""

from __future__ import annotations

from dataclasses import replace

from lockstep.report.page.figure import Figures, PlotSpec, list_axis, list_height, make_axis, value_axis
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

_FAR = 100  # times the smallest: on a linear axis that would not be seen


def show_records(files: dict[str, list[Record]], figures: Figures) -> Section | None:
    """All files, each with its plots and, beneath them, its table; then units that a file has but once."""
    section = Section("records", "Benchmark records")
    single: dict[str, dict[str, Record]] = {}
    for name, records in files.items():
        section.add(write_heading(name))
        for unit in dict.fromkeys(record.unit for record in records):
            own = [record for record in records if record.unit == unit]
            if len(own) == 1:
                single.setdefault(unit, {})[name] = own[0]
            elif any(record.value for record in own):
                section.add(figures.place(_bars(f"{name}: {unit}", unit, own)))
        section.add(_table(name, records))
    _add_single(section, single, figures)
    return section if section.parts else None


def _add_single(section: Section, units: dict[str, dict[str, Record]], figures: Figures) -> None:
    """Records that are alone with their unit in their file, beside those of other files."""
    shown = {
        unit: found
        for unit, found in units.items()
        if len(found) > 1 and any(record.value for record in found.values())
    }
    if shown:
        section.add(write_heading("Of several files, by unit"))
    for unit, found in shown.items():
        own = [replace(record, name=f"{file}: {record.name}") for file, record in found.items()]
        title = f"Single records in {unit}"
        rows = [(record.name, show_number(record.value, unit=unit)) for record in own]
        table = html_table(title, ("what", "value"), rows)
        section.add(figures.place(_bars(title, unit, own), table))


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


def _bars(title: str, unit: str, records: list[Record]) -> PlotSpec:
    """A bar a record, with a line from its lowest to its highest value; points where values lie far apart."""
    values = [record.value for record in records]
    names = [record.name for record in records]
    lows = [min(record.value, record.spread[0]) for record in records]
    is_log = min(lows) > 0 and max(values) >= _FAR * min(values)
    shape = {"type": "scatter", "mode": "markers"} if is_log else {"type": "bar", "orientation": "h"}
    trace = {
        **shape,
        "name": unit,
        "showlegend": False,
        "marker": {"color": "c0", "size": 9} if is_log else {"color": "c0"},
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
    highs = [max(record.value, record.spread[1]) for record in records]
    axis = value_axis(unit, [*lows, *highs], _FAR, "~g") if is_log else make_axis(unit)
    layout = {"xaxis": axis, "yaxis": list_axis(names)}
    says = f"{'Points' if is_log else 'Bars'} of {len(records)} records in {unit}, each with its spread."
    return PlotSpec(title, says, [trace], layout, list_height(len(records)))
