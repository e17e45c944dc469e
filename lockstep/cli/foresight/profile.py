"""`lockstep profile`: time, multiplications, bytes and memory of every layer of a run's model, here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_run_keys
from lockstep.cli.train import named_file, resolve
from lockstep.errors import BadInput
from lockstep.planner.remembered import remember_profile
from lockstep.spec import Launch
from lockstep.spec.profile import LAYER_KINDS, LayerProfile, LayerTime, Profile, write_profile

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXT = """\
Measure what every layer of a run's model costs on this machine, and whole steps of one worker:

  lockstep profile cifar10 --batch 1,4,16,64 --picture layers.png --output profile.json
  lockstep plan cifar10 --profile profile.json --cluster cluster.toml --workers 4

Each layer is timed by itself with stock kernels, forward and backward, at the shapes it has in training, and
with --parts channel=2,spatial=2 also at those a plan would give it: half the filters do not take half the
time. Steps are those of training, with the kernels that it uses. The run's own data must be there.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "profile",
        help="measure what every layer of a model costs here",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_keys(parser)
    add_device(parser)
    parser.add_argument(
        "--batch",
        default="",
        metavar="N,N…",
        help="images at once, for layers; default: those of one of the run's lanes",
    )
    parser.add_argument("--parts", default="", metavar="AXIS=N,…", help="as in channel=2,spatial=2")
    parser.add_argument("--steps", type=int, default=12, help="steps whose median counts; default: 12")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write the profile; must not exist yet"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw time by kind of layer and batch"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="layers one after another, for Perfetto"
    )
    parser.set_defaults(handler=show_profile)


def show_profile(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    run, _ = resolve(options, Launch())
    sizes, parts = read_sizes(options.batch), read_parts(options.parts)
    if options.steps < 1:
        raise BadInput(f"--steps {options.steps} must be at least 1")
    for path in (options.output, options.picture, options.trace):
        check_new(path)
    from lockstep.kernels.numerics import plain_torch
    from lockstep.train.foresight.measured_profile import ProfileOptions, measure_profile

    asked = ProfileOptions(sizes, options.steps, parts)
    with named_file(options), plain_torch():
        profile = measure_profile(run, Launch(device=options.device), asked, say)
    remember_profile(run, profile)
    print("\n".join(tell_layers(profile)))
    if options.output:
        write_profile(options.output, profile)
        print(f"wrote {options.output}")
    if options.picture:
        _draw(options.picture, profile)
        print(f"drew {options.picture}")
    if options.trace:
        options.trace.write_text(json.dumps({"traceEvents": trace_events(profile)}) + "\n", encoding="utf-8")
        print(f"wrote {options.trace}: open it in ui.perfetto.dev or chrome://tracing")
    return 0


def read_sizes(text: str) -> tuple[int, ...]:
    """Numbers of images, in rising order."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 0 < int(word) <= 65536 for word in words):
        raise BadInput(f"--batch {text} must be whole numbers from 1 with commas between, as in 1,4,16")
    return tuple(sorted({int(word) for word in words}))


def read_parts(text: str) -> tuple[tuple[str, int], ...]:
    """Axes and numbers of workers."""
    found = []
    for word in filter(None, text.split(",")):
        axis, _, count = word.strip().partition("=")
        if axis not in ("channel", "spatial") or not count.isdecimal() or int(count) < 2:
            raise BadInput(f"--parts {text} must be like channel=2,spatial=2")
        found.append((axis, int(count)))
    return tuple(found)


def check_new(path: Path | None) -> None:
    """Refuse a file that exists, or whose folder does not."""
    if path and path.exists():
        raise BadInput(f"{path} exists: give another name; nothing is overwritten")
    if path and not path.resolve().parent.is_dir():
        raise BadInput(f"{path}: there is no such folder; make it first")


def tell_layers(profile: Profile) -> list[str]:
    """A table of the layers at the largest number of images, and the steps."""
    size = max(time.images for layer in profile.layers for time in layer.times)
    rows = [("layer", "kind", "MMAC", "weights", "out KB", "forward ms", "backward ms", "GFLOP/s", "share")]
    whole = sum(_whole(layer, size).forward_s + _whole(layer, size).backward_s for layer in profile.layers)
    for layer in profile.layers:
        time = _whole(layer, size)
        both = time.forward_s + time.backward_s
        rate = f"{6e-9 * layer.macs * size / both:.1f}" if layer.macs and both else ""
        rows.append(
            (
                layer.name.removeprefix("blocks."),
                layer.kind,
                f"{layer.macs * 1e-6:.2f}" if layer.macs else "",
                f"{layer.parameters:,}" if layer.parameters else "",
                f"{4e-3 * layer.outputs:.0f}",
                f"{1e3 * time.forward_s:.2f}",
                f"{1e3 * time.backward_s:.2f}",
                rate,
                f"{100 * both / whole:.1f} %",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.append(
        f"\n{profile.model}, {profile.parameters:,} parameters, {profile.macs * 1e-6:,.1f} million "
        f"multiplications an image forward; layers with {size} images: {1e3 * whole:.1f} ms "
        f"on {profile.device}"
    )
    for row in profile.lanes:
        img_s = row.lanes * row.images / row.seconds
        lines.append(
            f"a step of {row.lanes} lane{'s' * (row.lanes > 1)} of {row.images} images: "
            f"{1e3 * row.seconds:.1f} ms, {img_s:,.0f} img/s ({profile.kernels} kernels, {profile.precision})"
        )
    if profile.update_s:
        lines.append(f"of it the update of the weights: {1e3 * profile.update_s:.2f} ms")
    return lines


def trace_events(profile: Profile) -> list[dict[str, object]]:
    """The layers one after another, forward and then backward, as Perfetto shows events."""
    size = max(time.images for layer in profile.layers for time in layer.times)
    events, now = list[dict[str, object]](), 0.0
    layers = [(layer, _whole(layer, size)) for layer in profile.layers]
    passes = [(layer, "forward", time.forward_s) for layer, time in layers]
    passes += [(layer, "backward", time.backward_s) for layer, time in reversed(layers)]
    for layer, name, seconds in passes:
        events.append(
            {
                "name": layer.name,
                "cat": layer.kind,
                "ph": "X",
                "ts": 1e6 * now,
                "dur": 1e6 * seconds,
                "pid": 0,
                "tid": 0 if name == "forward" else 1,
                "args": {"pass": name, "images": size, "macs": layer.macs, "parameters": layer.parameters},
            }
        )
        now += seconds
    return events


def _whole(layer: LayerProfile, images: int) -> LayerTime:
    return next(time for time in layer.times if time.images == images and not time.part)


def _draw(path: Path, profile: Profile) -> None:
    from lockstep.report.layer_stack import draw_layer_stack

    sizes = sorted({time.images for layer in profile.layers for time in layer.times if not time.part})
    kinds = {
        kind: [
            sum(
                _whole(layer, size).forward_s + _whole(layer, size).backward_s
                for layer in profile.layers
                if layer.kind == kind
            )
            for size in sizes
        ]
        for kind in LAYER_KINDS
    }
    image = f"{profile.shape[1]} × {profile.shape[2]} pixels"
    title = f"{profile.model}, {image}, {profile.precision}, {profile.device}: each layer by itself"
    draw_layer_stack(path, title, sizes, kinds, [0.0] * len(sizes))


def say(text: str) -> None:
    """Tell on stderr what is measured now."""
    print(f"lockstep: {text} …", file=sys.stderr, flush=True)
