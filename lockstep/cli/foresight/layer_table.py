"""A Profile in words: a table of its layers, one of batch sizes with and without loading, and its steps."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.planner.layer_seconds import moved_bytes
from lockstep.planner.memory import layer_memory
from lockstep.report.layer_stack import three_digits
from lockstep.spec.profile import LayerProfile, LayerTime, Profile

REACHED = 0.8  # of a layer's best rate: below it the layer has left its roofline
_ENOUGH = f"{100 * REACHED:.0f} %"
_LEFT = {"layer", "kind"}  # columns whose text begins at the left


def tell_layers(profile: Profile) -> list[str]:
    """The layers with the largest number of images, the batch sizes, and the steps."""
    size = profile.sizes[-1]
    lines = [*_align(_layer_rows(profile, size)), "", *_explain(profile, size), ""]
    lines += [*_align(_size_rows(profile)), ""]
    lines.append(
        f"{profile.model}, {profile.parameters:,} parameters, {profile.macs * 1e-6:,.1f} million "
        f"multiplications an image forward, on {profile.device}"
    )
    for row in profile.lanes:
        img_s = three_digits(row.lanes * row.images / row.seconds)
        lines.append(
            f"a step of {row.lanes} lane{'s' * (row.lanes > 1)} of {row.images} images: "
            f"{1e3 * row.seconds:.1f} ms, {img_s} img/s ({profile.kernels} kernels, {profile.precision})"
        )
    if profile.update_s:
        lines.append(f"of it the update of the weights: {1e3 * profile.update_s:.2f} ms")
    return lines


def layers_s(profile: Profile, images: int, kind: str = "") -> float:
    """Seconds of all layers, or of those of a kind, forward and backward."""
    return sum(layer.whole[images].both_s for layer in profile.layers if kind in ("", layer.kind))


def heavy_rates(profile: Profile, most: int) -> dict[str, list[float]]:
    """Shares of the best rate by batch size, of the layers that take longest; equal ones are one."""
    alike = dict[tuple[LayerTime, ...], list[LayerProfile]]()
    for layer in profile.layers:
        alike.setdefault(layer.times, []).append(layer)
    spent = {times: sum(layer.whole[profile.sizes[-1]].both_s for layer in alike[times]) for times in alike}
    heavy = sorted(spent, key=lambda times: -spent[times])[:most]
    found = dict[str, list[float]]()
    for times, (first, *others) in alike.items():
        if times in heavy:
            more = f" and {len(others)} like it" if others else ""
            rates = first.relative_rates
            found[_short(first.name) + more] = [rates[size] for size in profile.sizes]
    return found


def _layer_rows(profile: Profile, size: int) -> list[dict[str, str]]:
    rows, whole_s = [], layers_s(profile, size)
    for place, layer in enumerate(profile.layers):
        time = layer.whole[size]
        passes = 3 if place else 2  # the first layer's input needs no gradient
        flop = 2 * passes * layer.macs * size
        row = {
            "layer": _short(layer.name),
            "kind": layer.kind,
            "weights": f"{layer.parameters:,}" if layer.parameters else "",
            "MFLOP": f"{1e-6 * flop:,.1f}" if flop else "",
            "moved MB": f"{3e-6 * moved_bytes(layer, profile.precision, size):,.2f}",
            "memory MB": f"{1e-6 * layer_memory(layer, profile.precision, size):,.2f}",
            "forward ms": f"{1e3 * time.forward_s:,.2f}",
            "backward ms": f"{1e3 * time.backward_s:,.2f}",
            "GFLOP/s": f"{1e-9 * flop / time.both_s:,.1f}" if flop and time.both_s else "",
            "share": f"{100 * time.both_s / whole_s:.1f} %",
        }
        if len(profile.sizes) > 1:
            row[f"{_ENOUGH} from"] = str(layer.fewest_images(REACHED))
        rows.append(row)
    return rows


def _explain(profile: Profile, size: int) -> list[str]:
    lines = [
        f"all columns: with {size} image{'s' * (size > 1)}, forward and backward",
        "moved MB: what must at least be read and written",
        "memory MB: weights, their gradients, what the backward pass needs again; activations work in place",
    ]
    if len(profile.sizes) > 1:
        lines.append(f"{_ENOUGH} from: images at once with which the layer has {_ENOUGH} of its best img/s")
    return lines


def _size_rows(profile: Profile) -> list[dict[str, str]]:
    """With loading is as if nothing of it were hidden beside computing."""
    loading, rows = {row.images: row.seconds for row in profile.loading}, []
    for size in profile.sizes:
        compute_s = layers_s(profile, size)
        row = {
            "images": str(size),
            "layers ms": f"{1e3 * compute_s:,.2f}",
            "img/s": three_digits(size / compute_s),
        }
        if size in loading:
            row["loading ms"] = f"{1e3 * loading[size]:,.2f}"
            row["img/s with loading"] = three_digits(size / (compute_s + loading[size]))
        rows.append(row)
    return rows


def _short(name: str) -> str:
    return name.removeprefix("blocks.")


def _align(rows: Sequence[dict[str, str]]) -> list[str]:
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    return [
        "  ".join(
            row[name].ljust(widths[name]) if name in _LEFT else row[name].rjust(widths[name])
            for name in names
        ).rstrip()
        for row in ({name: name for name in names}, *rows)
    ]
