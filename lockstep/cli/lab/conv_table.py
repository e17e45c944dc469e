"""What `lockstep bench conv` measured, as lines of a table and as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.lab.conv.conv_bench import ConvTime
    from lockstep.lab.conv.conv_map import MapCell
    from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
    from lockstep.spec import Record

_WORDS = """\
GFLOP/s: operations of the direct sum over time, so that who computes less is seen to be faster. error: the
largest, over the largest result, against float64. work, depth: by formula, in millions of multiplications
with their additions. counted: millions of multiplications and additions that the program asks for."""


def tell_conv(found: list[ConvTime], precision: str) -> list[str]:
    """A group of rows for every layer and pass; the library is the last of each."""
    lines = list[str]()
    width = max((len(each.algorithm) for each in found), default=0)
    for layer, which in dict.fromkeys((each.layer, each.which) for each in found):
        rows = [each for each in found if (each.layer, each.which) == (layer, which)]
        library = next((each.time.median for each in rows if each.work is None), None)
        lines.append(f"{layer}: {tell_shape(rows[0].shape)}, {which.value}, {precision}")
        head = f"{'ms':>10}  {'GFLOP/s':>9}  {'of library':>10}  {'error':>7}"
        lines.append(f"  {'':{width}}  {head}  {'work':>9}  {'counted':>9}  {'depth':>5}")
        for each in rows:
            text = f"  {each.algorithm:{width}}  {1e3 * each.time.median:10.3f}  {each.gflop_s:9,.1f}  "
            share = f"{100 * library / each.time.median:8.1f} %" if library else f"{'–':>10}"
            text += f"{share}  {each.error:7.1e}"
            if each.work is not None and each.operations is not None:
                text += f"  {1e-6 * each.work:9,.1f}  {1e-6 * each.operations:9,.1f}  {each.depth:5}"
            lines.append(text)
    return [*lines, *_WORDS.splitlines()]


def tell_errors(found: Mapping[ConvPass, Mapping[str, Mapping[str, float | None]]]) -> list[str]:
    """A row for every algorithm, a column for every pass and precision."""
    passes = list(found)
    first = found[passes[0]]
    width, precisions = max(map(len, first)), list(next(iter(first.values())))
    heads = [f"{which.value}, {precision}" for which in passes for precision in precisions]
    lines = ["error by precision, 64 to 64 channels, 14 × 14, 3 × 3 filters:"]
    lines.append("  ".join([f"  {'':{width}}", *heads]))
    for name in first:
        errors = [found[which][name][precision] for which in passes for precision in precisions]
        told = [f"{'–' if error is None else f'{error:.1e}':>{len(head)}}"
                for error, head in zip(errors, heads, strict=True)]  # fmt: skip
        lines.append("  ".join([f"  {name:{width}}", *told]))
    return lines


def tell_map(cells: list[MapCell]) -> list[str]:
    """A row for every kernel and size: who wins at which channels."""
    lines = list[str]()
    for kernel, size in dict.fromkeys((each.shape.kernel, each.shape.width) for each in cells):
        row = [each for each in cells if (each.shape.kernel, each.shape.width) == (kernel, size)]
        told = ", ".join(f"{each.shape.in_channels} channels {each.winner}" for each in row)
        lines.append(f"{kernel} × {kernel} filters, {size} × {size} pixels: {told}")
    return lines


def conv_records(found: list[ConvTime], precision: str, kind: str, command: str) -> list[Record]:
    """Every time as a record."""
    from lockstep.lab.lab_record import make_lab_record

    end = f"{precision}, {kind}"
    return [
        make_lab_record(
            f"{each.algorithm}, {each.which.value}, {each.layer}: {tell_shape(each.shape)}, {end}",
            each.time.seconds,
            command,
            gflop_s=round(each.gflop_s, 3),
            error=each.error,
            work=each.work,
            operations=each.operations,
            depth=each.depth,
        )
        for each in found
    ]


def map_records(
    cells: list[MapCell], which: ConvPass, precision: str, kind: str, command: str
) -> list[Record]:
    """Every time of the map as a record."""
    from lockstep.lab.lab_record import make_lab_record

    return [
        make_lab_record(
            f"{name}, {which.value}, {tell_shape(cell.shape)}, {precision}, {kind}",
            time.seconds,
            command,
            wins=name == cell.winner,
        )
        for cell in cells
        for name, time in cell.times.items()
    ]


def tell_shape(shape: ConvShape) -> str:
    """A convolution in words, with what is not usual about it."""
    text = f"{shape.batch} × {shape.in_channels} × {shape.height} × {shape.width} to {shape.out_channels}, "
    text += f"{shape.kernel} × {shape.kernel}"
    usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    return text + "".join(
        f", {name} {getattr(shape, name)}" for name, value in usual.items() if getattr(shape, name) != value
    )
