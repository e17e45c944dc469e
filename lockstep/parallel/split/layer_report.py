"""What of a model is cut, by layer, and what the exchanges cost beside the computing: for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.lower.layer_split import GRADIENTS
from lockstep.parallel.split.axes import CHANNEL, SPATIAL
from lockstep.parallel.split.split_graph import OUTPUTS, SplitGraph
from lockstep.parallel.split.spread import count
from lockstep.parallel.split.way import Way

Row = dict[str, Any]
_MEASURED = ("busy_s", "channel_mb", "spatial_mb", "exchange_s")  # the largest over workers counts
_PASSES = 3  # forward, and the gradients of input and weights


def layer_rows(graph: SplitGraph) -> list[Row]:
    """A row for each call that computes something: its rule, its work for a lane, and the share that is cut.

    Of a layer without a rule, multiplications are estimated from its weights.
    """
    rows = []
    for place, way in enumerate(graph.ways):
        if way.rule != "shape":
            work = sum(way.work.values()) or _estimate(graph, place)
            rows.append(
                {
                    "layer": graph.layers[place],
                    "rule": way.rule,
                    "work_mmac": round(work / 1e6, 6),
                    "share": round(_share(graph, way), 4),
                }
            )
    return rows


def part_sizes(graph: SplitGraph) -> dict[str, tuple[str, str]]:
    """The rows and the channels of each call's result that one worker has at most; empty: all."""
    found, axes = {}, graph.axes
    for layer, node, way in zip(graph.layers, graph.calls, graph.ways, strict=True):
        spread, rows, channels = way.made, "", ""
        if spread.rows and axes.spatial.size > 1:
            most = max(map(count, axes.rows_of_all(spread.rows)))
            rows = f"{most} of {spread.rows}"
        if spread.channels:
            channels = f"{max(map(count, spread.channels))} of {graph.shapes[node.name][1]}"
        found[layer] = rows, channels
    return found


def share_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """The share of all multiplications that is cut."""
    total = sum(row["work_mmac"] for row in rows)
    return sum(row["work_mmac"] * row["share"] for row in rows) / total if total else 0.0


def tell_layers(graph: SplitGraph) -> str:
    """One line about what is cut and what not, with the reasons."""
    rows = [row for row in layer_rows(graph) if row["work_mmac"]]
    less = [row for row in rows if row["share"] < 1]
    rules = Counter(row["rule"] + (", in part" if row["share"] else "") for row in less)
    axes = [f"{axis}={graph.axes.group(axis).size}" for axis in _several(graph)]
    line = f"{100 * share_of(rows):.0f} % of the multiplications are cut over {','.join(axes)}"
    if not less:
        return f"{line}: all {len(rows)} layers"
    are = "is" if len(less) == 1 else "are"
    not_cut = f"{are} not, or over one axis only" if len(axes) > 1 else f"{are} computed by every worker"
    reasons = "; ".join(f"{count} × {rule}" for rule, count in rules.most_common())
    return f"{line}; {len(less)} of {len(rows)} layers {not_cut}: {reasons}"


def list_cells(graph: SplitGraph) -> list[str]:
    """Parts of layers that are computed in cells, as their kernels would give other bits otherwise."""
    return [
        f"{layer}.{part} by {grid}"
        for layer, way in zip(graph.layers, graph.ways, strict=True)
        for grid, parts in (("bands", way.by_band), ("slices", way.by_slice))
        for part in sorted(parts)
    ]


def measured_rows(graph: SplitGraph) -> list[Row]:
    """What this worker measured, for each layer and a step; with rows for outputs and gradients."""
    clock = graph.axes.clock
    steps, sent, found = max(clock.steps, 1), clock.traffic, []
    for layer in (*(row["layer"] for row in layer_rows(graph)), OUTPUTS, GRADIENTS):
        each = {axis: sent[axis, layer] for axis in (CHANNEL, SPATIAL)}
        row = {f"{axis}_mb": round(seen.num_bytes / steps / 1e6, 6) for axis, seen in each.items()}
        exchange_s = sum(seen.seconds for seen in each.values()) / steps
        busy_s = clock.busy_s.get(layer, 0.0) / steps
        found.append({"layer": layer, "busy_s": round(busy_s, 6), **row, "exchange_s": round(exchange_s, 6)})
    return found


def measured(graph: SplitGraph) -> Row:
    """What this worker measured: its rows, and the events of its last step in Unix time."""
    return {"rows": measured_rows(graph), "events": graph.axes.clock.events}


def summarize_layers(graph: SplitGraph, found: Sequence[Row]) -> Row:
    """What `summary.json` has, from what all workers measured."""
    rows, workers = layer_rows(graph), [own["rows"] for own in found]
    known = {row["layer"]: row for row in rows}
    merged = [
        {
            **known.get(same[0]["layer"], {"layer": same[0]["layer"]}),
            **{key: max(row[key] for row in same) for key in _MEASURED},
        }
        for same in zip(*workers, strict=True)
    ]
    shown = [row for row in merged if "rule" in row or row["exchange_s"]]
    totals = {key: max(sum(row[key] for row in own) for own in workers) for key in ("busy_s", "exchange_s")}
    return {
        "share": round(share_of(rows), 4),
        "bands": graph.axes.bands,
        "slices": graph.axes.slices,
        "cells": list_cells(graph),
        "timed": "launches" if any(p.is_cuda for p in graph.model.parameters()) else "work",
        **{key: round(value, 6) for key, value in totals.items()},
        "rows": shown,
        "timeline": _timeline([row["layer"] for row in shown], [own["events"] for own in found]),
    }


def _timeline(layers: Sequence[str], workers: Sequence[Sequence[Sequence[Any]]]) -> list[list[list[Any]]]:
    """Every worker's last step: the number of a row, what it did; microseconds: from when, how long."""
    places = {layer: place for place, layer in enumerate(layers)}
    first = min((event[2] for events in workers for event in events), default=0.0)
    return [
        [
            [places[layer], what, round(1e6 * (start - first)), round(1e6 * seconds)]
            for layer, what, start, seconds in events
            if layer in places
        ]
        for events in workers
    ]


def _share(graph: SplitGraph, way: Way) -> float:
    return way.share(graph.axes.channel.size, graph.axes.spatial.size)


def _estimate(graph: SplitGraph, place: int) -> float:
    """The multiplications of a layer that has no rule, forward and backward."""
    node = graph.calls[place]
    made = graph.shapes.get(node.name)
    if node.op != "call_module" or made is None:
        return 0.0
    module = graph.model.get_submodule(str(node.target))
    if isinstance(module, nn.Embedding):
        return 0.0
    weights = [p for p in module.parameters(recurse=False) if p.dim() > 1 and len(p)]
    return float(_PASSES * sum(weight.numel() * (made.numel() // len(weight)) for weight in weights))


def _several(graph: SplitGraph) -> list[str]:
    """The axes with several workers."""
    return [axis for axis in (SPATIAL, CHANNEL) if graph.axes.group(axis).size > 1]
