"""`lockstep profile`: time, multiplications, bytes and memory of every layer of a run's model, here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_run_keys, check_new_file
from lockstep.cli.train import named_file, resolve_steps
from lockstep.errors import BadInput
from lockstep.spec import Launch

if TYPE_CHECKING:
    from lockstep.spec.profile import Profile

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXT = """\
Measure what every layer of a run's model costs on this machine, and whole steps of one worker:

  lockstep profile cifar10 --batch 1,4,16,64 --picture layers.png --output profile.json
  lockstep plan cifar10 --profile profile.json --cluster cluster.toml --workers 4

Each layer is timed by itself with stock kernels, forward and backward, at the shapes it has in training, and
with --parts channel=2,spatial=2 also at those a plan would give it: half the filters do not take half the
time. Steps are those of training, with the kernels that it uses. The run's own data must be there: how long
its loader takes is measured too. With several batches the table and the picture say below which one a layer
becomes slow: it has left its roofline, as starting it or reading its weights takes the time.
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
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="draw time by kind of layer and batch, and where layers slow down",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="layers one after another, for Perfetto"
    )
    parser.set_defaults(handler=show_profile)


def show_profile(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    run = resolve_steps(options, Launch())
    sizes, parts = read_sizes(options.batch), read_parts(options.parts)
    if options.steps < 1:
        raise BadInput(f"--steps {options.steps} must be at least 1")
    for path in (options.output, options.trace):
        check_new(path)
    if options.picture:
        check_new_file(options.picture, "--picture")
    from lockstep.cli.foresight.layer_table import tell_layers
    from lockstep.kernels.numerics import plain_torch
    from lockstep.planner.remembered import remember_profile
    from lockstep.spec.profile import write_profile
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


def trace_events(profile: Profile) -> list[dict[str, object]]:
    """The layers one after another, forward and then backward, as Perfetto shows events."""
    size = profile.sizes[-1]
    events, now = list[dict[str, object]](), 0.0
    layers = [(layer, layer.whole[size]) for layer in profile.layers]
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


def _draw(path: Path, profile: Profile) -> None:
    from lockstep.cli.foresight.layer_table import REACHED, heavy_rates, layers_s
    from lockstep.report.layer_stack import MOST_LINES, draw_layer_stack
    from lockstep.spec.profile import LAYER_KINDS

    sizes = profile.sizes
    kinds = {kind: [layers_s(profile, size, kind) for size in sizes] for kind in LAYER_KINDS}
    rates = heavy_rates(profile, MOST_LINES)
    image = f"{profile.shape[1]} × {profile.shape[2]} pixels"
    title = f"{profile.model}, {image}, {profile.precision}, {profile.device}: each layer by itself"
    load_s = [row.seconds for row in profile.loading]
    draw_layer_stack(path, title, sizes, kinds, load_s, rates, REACHED)


def say(text: str) -> None:
    """Tell on stderr what is measured now."""
    print(f"lockstep: {text} …", file=sys.stderr, flush=True)
