"""`lockstep bench gemm`: the ladder of matrix products on this machine, as table, picture and records."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_json, check_new_file
from lockstep.errors import BadInput

if TYPE_CHECKING:
    from lockstep.lab.gemm.gemm_bench import GemmTime, Shape
    from lockstep.spec import Record

GEMM = """\
Multiply matrices in every way from plain loops, or one GPU thread an element, to the vendor's library, and
see what each step brings on this machine:

  lockstep bench gemm                               sizes that fit the device
  lockstep bench gemm --sizes 512,1024 --picture ladder.png
  lockstep bench gemm --skinny                      b × 4096 by 4096 × 9192, b = 1 … 256: small batches

Each rung is one short file under lockstep/lab/gemm that says what it changes and why that helps. On a CPU
they are C, compiled by the system's compiler; on a GPU CUDA C++, compiled by NVRTC. What is missing is said,
and the others run.
"""
_SIZES = {"cpu": "256,512,1024", "cuda": "1024,2048,4096,8192"}
_SKINNY = (1, 4, 16, 64, 256)  # rising, so that what takes too long is known before
_LARGEST = 32768


def add_gemm(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench gemm`."""
    add_device(parser)
    parser.add_argument("--sizes", metavar="N,N…", help="of square matrices; default: by device")
    parser.add_argument("--skinny", action="store_true", help="few rows by a large matrix, not squares")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; default: its cores")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the ladder")
    add_json(parser)


def show_gemm(options: argparse.Namespace) -> int:
    """Measure, print a table, and draw it if asked."""
    import os

    from lockstep.kernels.numerics import plain_torch, prepare_device
    from lockstep.lab.gemm.gemm_bench import GemmTime, measure_gemm

    if options.picture:
        check_new_file(options.picture, "--picture")
    if options.threads < 0:
        raise BadInput(f"--threads {options.threads} must be 1 or more")
    found, threads = list[GemmTime](), options.threads or len(os.sched_getaffinity(0))
    with plain_torch():
        device = prepare_device(options.device, 1)
        shapes = _shapes(options, device.type)
        for each in measure_gemm(device, shapes, threads, 0.5):
            if isinstance(each, GemmTime):
                found.append(each)
                _say(f"{_size(each.shape)}: {each.rung}")
            else:
                _say(f"left out: {each.rung}{f' at {_size(each.shape)}' if each.shape else ''}: {each.why}")
    if options.json:
        print(json.dumps([asdict(record) for record in records_of(found, device.type)], indent=1))
    else:
        print("\n".join(tell_ladder(found)))
    if options.picture:
        from lockstep.report.ladder_picture import draw_ladder

        rates = {rung: [each.gflop_s for each in found if each.rung == rung] for rung in _rungs(found)}
        draw_ladder(options.picture, [_size(shape) for shape in shapes], rates)
        _say(f"drew {options.picture}")
    return 0


def _shapes(options: argparse.Namespace, kind: str) -> list[Shape]:
    if options.skinny:
        if options.sizes:
            raise BadInput("--skinny has sizes of its own: leave out --sizes")
        return [(rows, 9192, 4096) for rows in _SKINNY]
    text = options.sizes or _SIZES[kind]
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= _LARGEST for word in words):
        raise BadInput(f"--sizes {text} must be whole numbers from 1 to {_LARGEST} with commas between")
    return [(size, size, size) for size in dict.fromkeys(map(int, words))]


def tell_ladder(found: list[GemmTime]) -> list[str]:
    """A row for every rung, a group of rows for every size; the library is the last of each."""
    lines = list[str]()
    for shape in dict.fromkeys(each.shape for each in found):
        rows = [each for each in found if each.shape == shape]
        best, width = rows[-1], max(len(each.rung) for each in rows)
        lines.append(f"{_size(shape)}, fp32")
        before = 0.0
        for each in rows:
            ms, rate = 1e3 * each.time.median, each.gflop_s
            gain = f"{rate / before:6.2f} x the one before" if before else ""
            lines.append(
                f"  {each.rung:{width}}  {ms:10.3f} ms  {rate:10,.1f} GFLOP/s  "
                f"{100 * rate / best.gflop_s:6.1f} % of {best.rung}  {gain}".rstrip()
            )
            before = rate
    return lines


def records_of(found: list[GemmTime], kind: str) -> list[Record]:
    """Every time as a record."""
    from lockstep.lab.lab_record import make_lab_record

    command = " ".join(["lockstep", *sys.argv[1:]])
    return [
        make_lab_record(
            f"{each.rung}, {_size(each.shape)}, fp32, {kind}",
            each.time.seconds,
            command,
            gflop_s=round(each.gflop_s, 3),
        )
        for each in found
    ]


def _rungs(found: list[GemmTime]) -> list[str]:
    return list(dict.fromkeys(each.rung for each in found))


def _size(shape: Shape) -> str:
    rows, columns, depth = shape
    return f"{rows} × {depth} by {depth} × {columns}" if len(set(shape)) > 1 else f"{rows} × {rows}"


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
