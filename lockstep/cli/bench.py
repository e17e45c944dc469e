"""`lockstep bench`: a model's fastest tiles, layers that take all lanes at once, how fast images are read."""

from __future__ import annotations

import argparse
import os
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.data_action.reading import IO as _IO
from lockstep.cli.data_action.reading import add_reading, show_reading
from lockstep.cli.flag import add_run_keys
from lockstep.cli.lab.baselines import BASELINES, add_baselines, show_baselines
from lockstep.cli.lab.conv import CONV, add_conv, show_conv
from lockstep.cli.lab.gemm import GEMM, add_gemm, show_gemm
from lockstep.cli.lab.threads import BENCH_THREADS, add_threads, show_threads
from lockstep.cli.train import resolve_steps
from lockstep.errors import BadInput, ModelError
from lockstep.spec import Launch

if TYPE_CHECKING:
    from lockstep.kernels.triton.conv.tile import Tile

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_PROCESSES = 8  # at most: each holds the whole batch on the GPU
_TUNE = """\
Measure which tile each fused kernel of a run's model is fastest with on this GPU, and write them to a file:

  lockstep bench tune fashion -o train.precision=bf16 --output tiles.toml
  lockstep train fashion -o train.precision=bf16 -o kernels.table=tiles.toml

Training only looks tiles up, and they are part of its identity: another table is another run.
"""
_LANES = """\
Try on this device which convolutions of a run's model give every sample the same bits in all lanes at once as
in a lane by itself; kernels.set=compiled runs those at once and the others lane by lane:

  lockstep bench lanes cifar10 -o model.name=googlenet -o train.precision=bf16

The choices are part of a compiled run's identity.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb, its subcommands and their flags."""
    text = "measure on this machine what a run can use"
    parser = verbs.add_parser("bench", help=text, description=text.capitalize() + ".")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    each = {
        "tune": ("tiles for the fused kernels", _TUNE, tune_tiles),
        "lanes": ("which convolutions of a compiled model take all lanes at once", _LANES, show_lanes),
        "io": ("how fast a run's images are read", _IO, show_reading),
        "gemm": ("matrix products from plain loops to the vendor's library", GEMM, show_gemm),
        "baselines": ("one training run by every framework and by hand", BASELINES, show_baselines),
        "threads": (
            "training by 1, 2, 4 … threads or workers, bit by bit the same",
            BENCH_THREADS,
            show_threads,
        ),
        "conv": ("convolutions by every algorithm, forward and backward", CONV, show_conv),
    }
    for name, (text, description, handler) in each.items():
        one = what.add_parser(
            name, help=text, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        one.set_defaults(handler=handler)
        if name in ("tune", "lanes", "io"):
            add_run_keys(one)
    output = what.choices["tune"]
    output.add_argument("--output", type=Path, required=True, metavar="FILE.toml", help="must not exist yet")
    add_reading(what.choices["io"])
    add_gemm(what.choices["gemm"])
    add_baselines(what.choices["baselines"])
    add_threads(what.choices["threads"])
    add_conv(what.choices["conv"])


def tune_tiles(options: argparse.Namespace) -> int:
    """Measure the fastest tiles and write them to a file."""
    from lockstep.data import open_data
    from lockstep.kernels.loss import make_loss
    from lockstep.kernels.numerics import prepare_device
    from lockstep.lower.choose import lower_for_device
    from lockstep.models import build_model
    from lockstep.train.preflight import explain_memory

    run = resolve_steps(options, Launch())
    if options.output.exists():
        raise BadInput(f"--output {options.output} exists: give another name; nothing is overwritten")
    if not options.output.resolve().parent.is_dir():
        raise BadInput(f"--output {options.output}: there is no such folder; make it first")
    device = prepare_device("auto", run.train.threads)
    if device.type != "cuda":
        raise BadInput("bench tune: torch sees no GPU here, and tiles are for a GPU; run `lockstep doctor`")
    store = open_data(run)
    model = build_model(run, store.shape, len(store.classes))
    lowering = lower_for_device(run, model, make_loss(run.train), store.shape, device, trains=False)
    if lowering is None or not lowering.is_fused:
        raise ModelError(
            f"model.name={run.model.name} in {run.train.precision} does not run on fused kernels, and only "
            "these have tiles: try -o kernels.set=fused, which takes it or says why not"
        )
    import torch
    from rich.progress import Progress

    from lockstep.measure.tune import tune

    processes = max(min(len(os.sched_getaffinity(0)) - 2, _PROCESSES), 1)
    with explain_memory(run, device, at_once=True), Progress(transient=True) as bars:
        tasks = {name: bars.add_task(name, total=None) for name in ("compiling", "timing")}
        tiles = tune(
            lowering.program.make,
            lowering.program.layers,
            run.train,
            device,
            lambda name, done, total: bars.update(tasks[name], completed=done, total=total),
            processes,
        )
    options.output.write_text(to_toml(tiles, torch.cuda.get_device_name(device)))
    print(f"{len(tiles)} tiles in {options.output}: train with -o kernels.table={options.output}")
    return 0


def show_lanes(options: argparse.Namespace) -> int:
    """Print for each convolution whether it computes all lanes at once or lane by lane."""
    if not find_spec("triton"):
        raise BadInput("bench lanes: kernels.set=compiled needs the package triton, which is not installed")
    from rich.console import Console

    from lockstep.data import open_data
    from lockstep.kernels.numerics import plain_torch, prepare_device, to_device
    from lockstep.lower.compiled.compiled_program import find_compiled, prove_lanes
    from lockstep.models import build_model

    run = resolve_steps(options, Launch())
    console, text = Console(stderr=True), "trying every convolution, in all lanes and in one"
    if not console.is_terminal:
        console.print(text)
    with plain_torch(), console.status(text):
        device = prepare_device("auto", run.train.threads, tf32=run.train.precision == "tf32")
        store = open_data(run)
        model = to_device(build_model(run, store.shape, len(store.classes)), device, run)
        try:
            program = find_compiled(model, store.shape, run.train)
            if device.type == "cuda":  # its kernels run on no other device
                program = prove_lanes(program, run.train, device)
            convs = program.model.convs
        except ModelError as error:
            raise ModelError(f"bench lanes: kernels.set=compiled cannot take this run: {error}") from None
    widest = max(map(len, convs), default=0)
    print(f"{'convolution':{widest}}  forward       data gradient")
    for name, conv in convs.items():
        forward = "own kernel" if conv.own else _way(conv.forward_at_once)
        print(f"{name:{widest}}  {forward:12}  {_way(conv.gradient_at_once)}")
    train, size = run.train, run.train.batch // run.train.lanes
    print(
        f"on {device.type} in {train.precision}, {train.lanes} lanes of {size} images, where the run is "
        "compiled, which needs a GPU; weight gradients run lane by lane, except those of our own kernels. "
        "`lockstep doctor` shows which models auto compiles."
    )
    return 0


def _way(at_once: bool) -> str:
    return "at once" if at_once else "lane by lane"


def to_toml(tiles: dict[str, Tile], device: str) -> str:
    """A table of tiles as TOML text."""
    lines = [f"# Tiles measured on {device}: rows, columns, depth, warps, stages, parts, boxes.", "[tiles]"]
    for name, tile in tiles.items():
        lines.append(f'"{name}" = {list(map(int, astuple(tile)))}')
    return "\n".join(lines) + "\n"
