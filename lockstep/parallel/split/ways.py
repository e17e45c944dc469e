"""The way of each kind of call under a plan; which calls are of a kind is in `rules.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.parallel.model_graph import Values
from lockstep.parallel.split import rules
from lockstep.parallel.split.call_site import CallSite
from lockstep.parallel.split.convert import to_part, to_whole
from lockstep.parallel.split.lane_gradients import GradientPart
from lockstep.parallel.split.layers.conv_function import convolve
from lockstep.parallel.split.layers.split_conv import ConvCut
from lockstep.parallel.split.layers.split_linear import LinearCut
from lockstep.parallel.split.layers.split_mean import banded_mean
from lockstep.parallel.split.layers.split_norm import NormCut
from lockstep.parallel.split.layers.split_pool import PoolCut, PoolForm
from lockstep.parallel.split.spread import Spread
from lockstep.parallel.split.way import FORWARD, INPUT, WEIGHT, Way

WHOLE_RULE = "whole"  # of what is whole anyhow; where a cut was not possible, the reason follows


def choose_way(site: CallSite) -> Way:
    """The first kind that fits; what is of no kind is computed whole."""
    if site.keys and rules.is_shape_query(site.node):
        stand_in = torch.empty(site.shapes[0], device="meta")  # the whole value's shape, without the value
        return Way("shape", lambda values: site.stock({**values, site.keys[0]: stand_in}))
    if site.keys and site.made is not None:
        for find in _KINDS:
            way = find(site)
            if way:
                return way
    return site.whole(WHOLE_RULE if site.is_whole else f"{WHOLE_RULE}: no rule")


def _convolution(site: CallSite) -> Way | None:
    form, made, shape = rules.form_of_convolution(site.module), site.made, site.shapes[0]
    if form is None or made is None or len(shape) != 4:
        return None
    axes, given = site.axes, site.given[0]
    banded = rules.is_banded(made, axes.bands)
    is_cut = not (form.transposed and form.groups > 1)
    channels = axes.channels_of_all(made[1]) if is_cut else ()
    windows, across = (shape, made) if form.transposed else (made, shape)
    each = float(windows.numel() * (across[1] // form.groups) * form.kernel[0] * form.kernel[1])
    parts = (FORWARD, WEIGHT) if site.keys[0] == site.graph.input else (FORWARD, INPUT, WEIGHT)
    work = dict.fromkeys(parts, each)
    if not banded and not channels and not (is_cut and len(axes.slices_of(made[1])) > 1):
        few = "rows" if axes.bands > 1 else "channels"
        return site.whole(f"{WHOLE_RULE}: too few {few}", work)
    near = Spread(shape[2] if banded else 0, given.channels)  # from where it takes its input
    spread = Spread(made[2] if banded else 0, channels)
    cut = ConvCut(axes, form, near, spread, shape[2], made[2], shape[1], made[1])

    def run(values: Values) -> Tensor:
        weight, bias = site.parameters(values, "weight", "bias")
        assert weight is not None
        return convolve(cut, _in_half(site.rows(values[site.keys[0]], near)), weight, bias)

    if not banded and not channels:
        return Way(WHOLE_RULE, run, work=work, by_slice=cut.by_slice, cut=cut)
    told = ["own groups" if cut.own_groups else "output channels"] * bool(channels)
    told += [f"rows, halo of {form.window.reach - 1}"] * banded
    rule = " × ".join(told) + (", too few rows" if axes.spatial.size > 1 and not banded else "")
    part = GradientPart(banded, int(form.transposed), channels)
    return Way(
        rule,
        run,
        spread,
        work,
        by_channel=cut.by_channel,
        by_band=cut.by_band,
        by_slice=cut.by_slice,
        inner_first=cut.inner_first,
        cut=cut,
        gradients=site.gradients(part),
    )


def _linear(site: CallSite) -> Way | None:
    shape, made = site.shapes[0], site.made
    if type(site.module) is not nn.Linear or made is None or len(shape) != 2:
        return None
    spread = Spread(channels=site.axes.channels_of_all(made[1]))
    cut = LinearCut(site.axes, site.given[0], spread, shape[1], made[1])
    work = dict.fromkeys((FORWARD, INPUT, WEIGHT), float(shape.numel() * made[1]))
    whole = f"{WHOLE_RULE}: {'too few outputs' if site.axes.channel.size > 1 else 'no rows'}"
    if spread.is_whole and not cut.is_sliced:
        return site.whole(whole, work)

    def run(values: Values) -> Tensor:
        weight, bias = site.parameters(values, "weight", "bias")
        assert weight is not None
        return cut(_in_half(values[site.keys[0]]), weight, bias)

    rule = whole if spread.is_whole else "outputs, no rows" if site.axes.spatial.size > 1 else "outputs"
    rule += ", data gradient by slices" if cut.is_sliced else ""
    part = site.gradients(GradientPart(channels=spread.channels))
    part = {name: found for name, found in part.items() if name.endswith("weight")}  # biases are whole
    return Way(rule, run, spread, work, cut.by_channel, by_slice=cut.by_slice, cut=cut, gradients=part)


def _norm(site: CallSite) -> Way | None:
    module, given = site.module, site.given[0]
    if type(module) is not nn.BatchNorm2d or site.is_whole or any(len(own) > 1 for own in given.channels):
        return None
    if module.momentum is None or not module.track_running_stats or not module.training:
        return None
    cut = NormCut(site.axes, given, module.eps, module.momentum)

    def run(values: Values) -> Tensor:
        (count,) = site.parameters(values, "num_batches_tracked")
        weight, bias = site.parameters(values, "weight", "bias")
        running = site.parameters(values, "running_mean", "running_var")
        assert count is not None
        count.add_(1)
        return cut(values[site.keys[0]], weight, bias, [t for t in running if t is not None])

    part = site.gradients(GradientPart(channels=given.channels)) if given.channels else {}
    return Way("statistics by bands" if given.rows else "own channels", run, given, gradients=part)


def _pool(site: CallSite) -> Way | None:
    given, made = site.given[0], site.made
    if not isinstance(site.module, nn.MaxPool2d | nn.AvgPool2d) or site.is_whole or made is None:
        return None
    (key,) = site.keys
    if not given.rows:
        return site.own("own channels", given)
    form = PoolForm.of(site.module)
    if form and rules.is_banded(made, site.axes.bands):
        if site.axes.spatial.size == 1:  # it has all rows, and the same bits
            return site.own("own channels", Spread(made[2], given.channels))
        cut = PoolCut(site.axes, form, given, Spread(made[2], given.channels), made[3])
        return Way(f"rows, halo of {form.window.reach - 1}", lambda values: cut(values[key]), cut.made)
    near = Spread(channels=given.channels)
    rule = "own channels, rows gathered" if near.channels else "whole: rows gathered"
    return Way(rule, lambda values: site.stock({**values, key: site.rows(values[key], near)}), near)


def _mean(site: CallSite) -> Way | None:
    given, (key, *_) = site.given[0], site.keys
    keeps = rules.mean_dims(site.node, site.module)
    if keeps is None or site.is_whole or len(site.shapes[0]) != 4:
        return None
    made = Spread(channels=given.channels)
    if not given.rows:
        return site.own("own channels", made)
    return Way("sums by bands", lambda v: banded_mean(v[key], site.axes, given.rows, keeps), made)


def _flatten(site: CallSite) -> Way | None:
    given, shape, (key, *_) = site.given[0], site.shapes[0], site.keys
    if not rules.is_flatten(site.node, site.module) or site.is_whole or len(shape) < 2:
        return None
    size, near = shape[2:].numel(), Spread(channels=given.channels)
    scaled = tuple(tuple(range(r.start * size, r.stop * size) for r in own) for own in given.channels)
    rule = "rows gathered" if given.rows else "own channels"
    return Way(rule, lambda values: site.rows(values[key], near).flatten(1), Spread(channels=scaled))


def _concatenation(site: CallSite) -> Way | None:
    if not rules.is_concatenation(site.node) or site.is_whole:
        return None
    alike = len({(spread.rows, bool(spread.channels)) for spread in site.given}) == 1
    if not alike or len(site.keys) != len(site.node.args[0]):  # type: ignore[arg-type]
        return None
    first, starts = site.given[0], [0]
    for shape in site.shapes:
        starts.append(starts[-1] + shape[1])
    channels = tuple(
        tuple(
            range(start + own.start, start + own.stop)
            for spread, start in zip(site.given, starts, strict=False)
            for own in spread.channels[worker]
        )
        for worker in range(len(first.channels))
    )
    return site.own("own parts", Spread(first.rows, channels))


def _pointwise(site: CallSite) -> Way | None:
    given, made, axes = site.given[0], site.made, site.axes
    if site.is_whole or made is None or len({*site.given}) > 1 or len({*site.shapes, made}) > 1:
        return None
    if rules.is_exact(site.node, site.module):
        return site.own("own part", given, exact=True)
    counts = [made.numel()]
    if given.rows:
        counts += [made.numel() // made[2] * len(own) for (own,) in axes.rows_of_all(given.rows)]
    if not all(map(rules.keeps_vectors, counts)):
        return None
    if rules.is_smooth(site.module) and not given.channels:
        return site.own("own rows", given, exact=True)
    if not rules.is_lrn(site.module):
        return None
    (key,), across = site.keys, Spread(channels=given.channels)

    def run(values: Values) -> Tensor:
        return to_part(site.stock({**values, key: to_whole(values[key], axes, across)}), axes, across)

    return Way("own rows, channels gathered" if across.channels else "own rows", run, given)


_KINDS = (_convolution, _linear, _norm, _pool, _mean, _flatten, _concatenation, _pointwise)


def _in_half(x: Tensor) -> Tensor:
    """What autocast would hand to a kernel; weights follow."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
