"""`lockstep bench gemm`: the ladder of matrix products on this machine, as table, picture and records."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_json, check_new_file
from lockstep.errors import BadInput, LockstepError

if TYPE_CHECKING:
    import torch

    from lockstep.lab.gemm.gemm_bench import GemmTime, Shape
    from lockstep.lab.gemm.gemm_parts import GemmPart
    from lockstep.spec import Record

GEMM = """\
Multiply matrices in every way from plain loops, or one GPU thread an element, to the vendor's library, and
see what each step brings on this machine:

  lockstep bench gemm                               sizes that fit the device
  lockstep bench gemm --sizes 512,1024 --picture ladder.png
  lockstep bench gemm --skinny                      b × 4096 by 4096 × 9192, b = 1 … 256: small batches
  lockstep bench gemm --parts                       what memory and copies cost beside the product

Each rung is one short file under lockstep/lab/gemm that says what it changes and why that helps. On a CPU
they are C, compiled by the system's compiler; on a GPU CUDA C++, compiled by NVRTC. What is missing is said,
and the others run.
"""
_SIZES = {"cpu": "256,512,1024", "cuda": "1024,2048,4096,8192"}
_PART_SIZES = {"cpu": "256,1024", "cuda": "1024,4096"}
_SKINNY = (1, 4, 16, 64, 256)  # rising, so that what takes too long is known before
_LARGEST = {"cpu": 16384, "cuda": 32768}
_MOST_THREADS = 1024  # of 5_threads.c
_BUDGET_S = {"cpu": 0.5, "cuda": 1.0}


def add_gemm(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench gemm`."""
    add_device(parser)
    parser.add_argument("--sizes", metavar="N,N…", help="of square matrices; default: by device")
    parser.add_argument("--skinny", action="store_true", help="few rows by a large matrix, not squares")
    parser.add_argument(
        "--parts", action="store_true", help="memory, copies and product apart, not the ladder"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of a CPU; default: its cores")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the ladder")
    add_json(parser)


def show_gemm(options: argparse.Namespace) -> int:
    """Measure, print a table, and draw it if asked."""
    import os

    from lockstep.kernels.numerics import plain_torch, prepare_device

    if options.picture:
        check_new_file(options.picture, "--picture")
    if options.threads is not None and not 1 <= options.threads <= _MOST_THREADS:
        raise BadInput(f"--threads {options.threads} must be from 1 to {_MOST_THREADS}")
    if options.parts and (options.skinny or options.picture):
        raise BadInput("--parts has a table only: leave out --skinny and --picture")
    if options.parts and options.threads:
        raise BadInput(f"--threads {options.threads} is for the ladder: --parts takes one; leave it out")
    threads = options.threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with plain_torch():
        device = prepare_device(options.device, 1)
        shapes = _shapes(options, device.type)
        if options.parts:
            return _show_parts(device, [shape[0] for shape in shapes], options.json)
        found = _measure(device, shapes, threads)
    if not found:
        raise LockstepError("bench gemm: nothing could be measured")
    if options.json:
        print(json.dumps([asdict(record) for record in records_of(found, device.type)], indent=1))
    else:
        print("\n".join(tell_ladder(found)))
    if options.picture:
        _draw(options.picture, [_size(shape) for shape in shapes], found)
        _say(f"drew {options.picture}")
    return 0


def _measure(device: torch.device, shapes: list[Shape], threads: int) -> list[GemmTime]:
    from lockstep.lab.gemm.gemm_bench import GemmTime, measure_gemm

    found = list[GemmTime]()
    for each in measure_gemm(device, shapes, threads, _BUDGET_S[device.type]):
        if isinstance(each, GemmTime):
            found.append(each)
            _say(f"{_size(each.shape)}: {each.way.name}")
        else:
            _say(f"left out: {each.rung}{f' at {_size(each.shape)}' if each.shape else ''}: {each.why}")
    return found


def _shapes(options: argparse.Namespace, kind: str) -> list[Shape]:
    if options.skinny:
        if options.sizes is not None:
            raise BadInput("--skinny has sizes of its own: leave out --sizes")
        return [(rows, 9192, 4096) for rows in _SKINNY]
    usual, most = (_PART_SIZES if options.parts else _SIZES)[kind], _LARGEST[kind]
    text = usual if options.sizes is None else options.sizes
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise BadInput(f"--sizes {text} must be whole numbers from 1 to {most} with commas between")
    return [(size, size, size) for size in dict.fromkeys(map(int, words))]


def tell_ladder(found: list[GemmTime]) -> list[str]:
    """A row for every rung, a group of rows for every size and precision; each beside the
    library with as many threads."""
    lines = list[str]()
    for shape, precision in dict.fromkeys((each.shape, each.precision) for each in found):
        rows = [each for each in found if (each.shape, each.precision) == (shape, precision)]
        width = max(len(each.way.name) for each in rows)
        libraries = {each.way.threads: each for each in rows if each.way.is_library}
        beside = max((len(each.way.name) for each in libraries.values()), default=0)
        lines.append(f"{_size(shape)}, {precision}")
        before = 0.0
        for each in rows:
            ms, rate, best = 1e3 * each.time.median, each.gflop_s, libraries.get(each.way.threads)
            gain = f"{rate / before:6.2f} x the one before" if before else ""
            limit = f"{100 * rate / each.limit_gflop_s:5.1f} % of the limit" if each.limit_gflop_s else ""
            share = f"{100 * rate / best.gflop_s:6.1f} % of {best.way.name:{beside}}" if best else ""
            lines.append(
                f"  {each.way.name:{width}}  {ms:10.3f} ms  {rate:10,.1f} GFLOP/s  "
                f"{share:{beside and beside + 12}}  {limit:20}  {gain}".rstrip()
            )
            before = rate
    return lines


def _show_parts(device: torch.device, sizes: list[int], as_json: bool) -> int:
    from functools import partial

    import torch

    from lockstep.lab.gemm.cuda_ladder import best_fp32_rung, multiply_on_gpu
    from lockstep.lab.gemm.gemm_parts import measure_parts
    from lockstep.lab.lab_record import make_lab_record

    rung = best_fp32_rung() if device.type == "cuda" else None
    multiply = partial(multiply_on_gpu, rung) if rung else torch.mm
    what = f"the rung {rung.name!r}" if rung else "the library's product"
    found = [part for size in sizes for part in measure_parts(device, size, multiply)]
    if as_json:
        command = " ".join(["lockstep", *sys.argv[1:]])
        pools = {False: "no pool", True: "pool"}
        names = [
            f"{each.part}, {pools[each.has_pool]}, {each.size} × {each.size}, {device.type}" for each in found
        ]
        records = [
            make_lab_record(name, each.time.seconds, command) for name, each in zip(names, found, strict=True)
        ]
        print(json.dumps([asdict(record) for record in records], indent=1))
        return 0
    print("\n".join(tell_parts(found, what)))
    return 0


def tell_parts(found: list[GemmPart], what: str) -> list[str]:
    """A row for every part; without a pool of memory, and with one."""
    lines = list[str]()
    for size in dict.fromkeys(each.size for each in found):
        lines.append(f"{size} × {size}, fp32, {what}{'without a pool':>22}{'with a pool':>16}")
        times = {(each.part, each.has_pool): 1e3 * each.time.median for each in found if each.size == size}
        for part in dict.fromkeys(part for part, _ in times):
            lines.append(f"  {part:36}{times[part, False]:14.3f} ms{times[part, True]:13.3f} ms")
        totals = [
            sum(ms for (_, has_pool), ms in times.items() if has_pool == pool) for pool in (False, True)
        ]
        lines.append(f"  {'in all':36}{totals[0]:14.3f} ms{totals[1]:13.3f} ms")
    return lines


def records_of(found: list[GemmTime], kind: str) -> list[Record]:
    """Every time as a record."""
    from lockstep.lab.lab_record import make_lab_record

    command = " ".join(["lockstep", *sys.argv[1:]])
    return [
        make_lab_record(
            f"{each.way.name.removesuffix(', bf16')}, {_size(each.shape)}, {each.precision}, {kind}",
            each.time.seconds,
            command,
            gflop_s=round(each.gflop_s, 3),
            **({"limit_gflop_s": round(each.limit_gflop_s, 1)} if each.limit_gflop_s else {}),
        )
        for each in found
    ]


def _draw(path: Path, sizes: list[str], found: list[GemmTime]) -> None:
    from lockstep.report.ladder_picture import draw_ladder

    names = list(dict.fromkeys(each.way.name for each in found))
    rates = {
        name: {_size(each.shape): each.gflop_s for each in found if each.way.name == name} for name in names
    }
    draw_ladder(path, sizes, rates, {each.way.name for each in found if each.way.is_library})


def _size(shape: Shape) -> str:
    rows, columns, depth = shape
    return f"{rows} × {depth} by {depth} × {columns}" if len(set(shape)) > 1 else f"{rows} × {rows}"


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
