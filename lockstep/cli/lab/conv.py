"""`lockstep bench conv`: convolution by every algorithm on this machine, as table, map and records."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_json, check_new_file
from lockstep.cli.lab.conv_table import conv_records, map_records, tell_conv, tell_errors, tell_map
from lockstep.errors import BadInput

if TYPE_CHECKING:
    import torch

    from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
    from lockstep.spec import Record

CONV = """\
Convolve directly, by im2col, implicit GEMM, FFT and Winograd, forward and for both gradients, and see which
is fastest here, how exact it is and what it computes:

  lockstep bench conv                           layers of LeNet, AlexNet, GoogLeNet and ResNet
  lockstep bench conv --shape 8,64,56,56,128,3 --padding 1
                                                8 images of 64 × 56 × 56, 128 filters of 3 × 3
  lockstep bench conv --pass forward --precision bf16
  lockstep bench conv --map map.png             who wins, by channels, size and kernel
  lockstep bench conv --toeplitz matrix.png     the matrix that a small convolution is

Each algorithm is one short file under lockstep/lab/conv. What an algorithm does not admit is said, and the
others run. Direct and implicit GEMM on a CPU are C, compiled by the system's compiler.
"""
_PASSES = {"forward": "FORWARD", "data": "DATA", "weight": "WEIGHT"}
_BATCH = {("cpu", "fp32"): 2, ("cpu", "bf16"): 1, ("cuda", "fp32"): 64, ("cuda", "bf16"): 64}
_MAP_BATCH = {"cpu": 4, "cuda": 32}
_WINDOW = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_LARGEST = 1 << 28  # values of a tensor
_DRAWN = 49  # rows or columns of a matrix that can still be read


def add_conv(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench conv`."""
    add_device(parser)
    parser.add_argument("--shape", metavar="N,C,H,W,K,R", help="one convolution: images, channels, height, "
                        "width, filters, side of a filter; default: layers of known networks")  # fmt: skip
    for name, usual in _WINDOW.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"of --shape; default: {usual}")
    parser.add_argument("--pass", dest="which", choices=_PASSES, help="default: all three; of --map: forward")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--map", type=Path, metavar="FILE.png", help="measure a grid and draw who wins where")
    parser.add_argument("--toeplitz", type=Path, metavar="FILE.png", help="draw a convolution as a matrix")
    add_json(parser)


def show_conv(options: argparse.Namespace) -> int:
    """Measure and print, or draw what was asked for."""
    from lockstep.kernels.numerics import plain_torch, prepare_device

    shape = _check(options)
    with plain_torch():
        device = prepare_device(options.device, 1)
        if options.toeplitz:
            _draw_toeplitz(options.toeplitz, shape)
        if options.map:
            _measure_map(options, device)
        if not options.toeplitz and not options.map:
            _measure_layers(options, device, shape)
    return 0


def _measure_layers(options: argparse.Namespace, device: torch.device, shape: ConvShape | None) -> None:
    from lockstep.lab.conv.conv_bench import PRECISIONS, ConvTime, measure_conv, measure_errors
    from lockstep.lab.conv.conv_layers import sample_layers
    from lockstep.lab.conv.conv_shape import ConvPass, ConvShape

    layers = {"given": shape} if shape else sample_layers(_BATCH[device.type, options.precision])
    passes = [_pass(options.which)] if options.which else list(ConvPass)
    found, before, said = list[ConvTime](), "", set[tuple[str, str]]()
    for each in measure_conv(device, layers, passes, PRECISIONS[options.precision], 0.1):
        if isinstance(each, ConvTime):
            found.append(each)
            if (now := f"{each.layer}: {each.which.value}") != before:
                before = now
                _say(now)
        elif (each.algorithm, each.why) not in said:
            said.add((each.algorithm, each.why))
            _say(f"left out: {each.algorithm} ({each.layer}): {each.why}")
    if options.json:
        _print_records(conv_records(found, options.precision, device.type, _command()))
        return
    print("\n".join(tell_conv(found, options.precision)))
    small = ConvShape(2, 64, 64, 14, 14, 3, padding=1)
    print("\n".join(tell_errors({which: measure_errors(device, small, which) for which in passes})))


def _measure_map(options: argparse.Namespace, device: torch.device) -> None:
    from lockstep.lab.conv.conv_algorithm import CONV_ALGORITHMS
    from lockstep.lab.conv.conv_bench import PRECISIONS
    from lockstep.lab.conv.conv_map import MAP_CHANNELS, MAP_SIZES, MapCell, measure_map, network_points
    from lockstep.report.conv_map_picture import DrawnCell, draw_conv_map

    which, cells, kernel = _pass(options.which or "forward"), list[MapCell](), 0
    batch, precision = _MAP_BATCH[device.type], PRECISIONS[options.precision]
    for cell in measure_map(device, which, precision, batch, 0.03):
        cells.append(cell)
        if cell.shape.kernel != kernel:
            kernel = cell.shape.kernel
            _say(f"map: {kernel} × {kernel} filters")
    if options.json:
        _print_records(map_records(cells, which, options.precision, device.type, _command()))
    else:
        print("\n".join(tell_map(cells)))
    drawn = [
        DrawnCell(
            each.shape.kernel,
            each.shape.in_channels,
            each.shape.width,
            each.winner,
            each.gain_over("im2col + GEMM"),
        )
        for each in cells
    ]
    title = f"{which.value}, {options.precision}, {batch} image{'s' if batch > 1 else ''}, {device.type}"
    names = [algorithm.name for algorithm in CONV_ALGORITHMS]
    draw_conv_map(options.map, title, names, (MAP_CHANNELS, MAP_SIZES), drawn, network_points())
    _say(f"drew {options.map}")


def _draw_toeplitz(path: Path, shape: ConvShape | None) -> None:
    from lockstep.lab.conv.conv_shape import ConvShape
    from lockstep.lab.conv.toeplitz import toeplitz_taps
    from lockstep.report.toeplitz_picture import draw_toeplitz

    drawn = shape or ConvShape(1, 1, 1, 5, 5, 3)
    draw_toeplitz(
        path, toeplitz_taps(drawn).tolist(), drawn.image_size[2:], drawn.result_size[2:], drawn.kernel
    )
    _say(f"drew {path}")


def _check(options: argparse.Namespace) -> ConvShape | None:
    """The shape that was given, or None; everything else is refused before any work."""
    for flag in ("map", "toeplitz"):
        if path := getattr(options, flag):
            check_new_file(path, f"--{flag}")
    if options.map and options.map == options.toeplitz:
        raise BadInput(f"--map and --toeplitz {options.map}: two pictures need two files")
    if options.toeplitz and options.json and not options.map:
        raise BadInput(f"--toeplitz {options.toeplitz} only draws: leave out --json")
    if options.map and options.shape is not None:
        raise BadInput(f"--shape {options.shape}: --map has shapes of its own: leave out --shape")
    window = {name: getattr(options, name) for name in _WINDOW if getattr(options, name) is not None}
    if options.shape is None:
        for name, value in window.items():
            raise BadInput(f"--{name} {value} belongs to a shape: give --shape too")
        return None
    shape = _read_shape(options.shape, window)
    if (
        options.toeplitz
        and max(shape.height * shape.width, shape.result_size[2] * shape.result_size[3]) > _DRAWN
    ):
        raise BadInput(f"--shape {options.shape}: a matrix drawn by --toeplitz has at most {_DRAWN} rows and "
                       f"columns, one a pixel: give a smaller image, such as 1,1,5,5,1,3")  # fmt: skip
    return shape


def _read_shape(text: str, window: dict[str, int]) -> ConvShape:
    from lockstep.lab.conv.conv_shape import ConvShape

    words = [word.strip() for word in text.split(",")]
    if len(words) != 6 or not all(word.isdecimal() and 1 <= int(word) <= _LARGEST for word in words):
        raise BadInput(f"--shape {text} must be six whole numbers from 1, with commas between: images, "
                       "channels, height, width, filters, side of a filter")  # fmt: skip
    for name, value in window.items():
        least = 0 if name == "padding" else 1
        if not least <= value <= _LARGEST:
            raise BadInput(f"--{name} {value} must be from {least} to {_LARGEST}")
    batch, inside, height, width, outside, kernel = map(int, words)
    shape = ConvShape(batch, inside, outside, height, width, kernel, **window)
    if inside % shape.groups or outside % shape.groups:
        raise BadInput(
            f"--groups {shape.groups} must divide {inside} channels and {outside} filters of --shape"
        )
    if min(shape.result_size) < 1:
        raise BadInput(f"--shape {text}: a filter of {kernel} with dilation {shape.dilation} is larger than "
                       f"the image with padding {shape.padding}: give a larger image")  # fmt: skip
    largest = max(_values(size) for size in (shape.image_size, shape.weight_size, shape.result_size))
    if largest > _LARGEST:
        raise BadInput(f"--shape {text}: a tensor of {largest:,} values is more than {_LARGEST:,}: give less")
    return shape


def _values(size: tuple[int, ...]) -> int:
    from math import prod

    return prod(size)


def _pass(name: str) -> ConvPass:
    from lockstep.lab.conv.conv_shape import ConvPass

    return ConvPass[_PASSES[name]]


def _print_records(records: list[Record]) -> None:
    print(json.dumps([asdict(record) for record in records], indent=1))


def _command() -> str:
    return " ".join(["lockstep", *sys.argv[1:]])


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
