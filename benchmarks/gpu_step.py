"""A whole training step on one GPU: this engine beside PyTorch eager and compiled, Lightning and JAX.

Same model, data, batch, precision; every variant in a process of its own (timing.py), cheap ones first.
A variant that fails or takes too long has a record with n = 0 and the reason.

python benchmarks/gpu_step.py --model emotion48 --batch 128,1024,8192 --precision bf16 --lanes 8 --rounds 5
python benchmarks/gpu_step.py --batch 1024 --variants "lockstep; compile; max-autotune, graph"
python benchmarks/gpu_step.py --batch 4096 --lanes 1,8,64 --variants lockstep
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from case import Case, Job
from measure import RESULTS, make_parser, make_record
from rich.console import Console
from rich.table import Table
from timing import time_apart

from lockstep.spec.record import Record, write_records
from lockstep.spec.run import KERNEL_SETS

OURS = "lockstep"
COLORS = {
    OURS: "#cc3311",
    "plain loop": "#d8d8d8",
    "resident fp32 eager": "#b4b4b4",
    "resident": "#8c8c8c",
    "lightning": "#aa4499",
    "jax": "#117733",
    "compile": "#88ccee",
    "compile, graph": "#4477aa",
    "max-autotune, graph": "#223366",
}
VARIANTS = tuple(COLORS)  # in the order they run
OUR_COLORS = COLORS[OURS], "#ee7733", "#f4b183"  # for several numbers of lanes
# in_channels, image size, classes
MODELS = {
    "emotion48": (1, 48, 7),
    "resnet18": (3, 32, 10),
    "alexnet": (3, 224, 1000),
    "googlenet": (3, 224, 1000),
    "resnet50": (3, 224, 1000),
    "timm:efficientnet_b0": (3, 224, 1000),
    "timm:convnext_atto": (3, 224, 1000),
    "timm:mobilenetv3_small_100": (3, 224, 1000),
    "timm:regnety_004": (3, 224, 1000),
}
DATA_BYTES = 2**29


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("--model", type=split, default=["emotion48"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=split, default=["128", "1024", "8192"])
    parser.add_argument("--precision", choices=("bf16", "tf32", "fp32"), default="bf16")
    parser.add_argument("--lanes", type=split, default=["8"], help="of this engine, perhaps several")
    parser.add_argument("--kernels", choices=KERNEL_SETS, default="auto", help="of this engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--variants",
        type=split_variants,
        default=VARIANTS,
        help=f"separated by ; or , of {'; '.join(VARIANTS)}",
    )
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a variant may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    output = options.output or RESULTS / "gpu-step.json"
    cases = [
        make_case(name, int(batch), options.precision) for name in options.model for batch in options.batch
    ]
    found: dict[Case, dict[str, Record]] = {case: {} for case in cases}
    start = time.perf_counter()
    for variant in options.variants:
        for case in cases:
            for lanes in options.lanes if variant == OURS else ["1"]:
                job = Job(case, variant, int(lanes), options.rounds, options.device, options.kernels)
                found[case][label(job)] = measure(job, options.limit)
                write_records(output, collect(found))  # so that what is measured stays if time runs out
    console = Console(width=120)
    for case, records in found.items():
        console.print(make_table(case, records))
    picture = draw(found, output.with_suffix(".png"))
    print(f"{time.perf_counter() - start:.0f} s in all; {output.name}, {picture.name} in {output.parent}")


def split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def split_variants(text: str) -> list[str]:
    """Names in the order they run; a name may hold a comma, which does not split it."""
    rest, chosen = text, set()
    for name in sorted(VARIANTS, key=len, reverse=True):
        if name in rest:
            chosen.add(name)
            rest = rest.replace(name, "")
    if rest.strip(",; "):
        raise argparse.ArgumentTypeError(f"no such variant: {rest.strip(',; ')}")
    return [name for name in VARIANTS if name in chosen]


def make_case(model: str, batch: int, precision: str) -> Case:
    """At least 16 batches of data, and about half a GiB of it where that is not more than 65536 images."""
    in_channels, size, num_classes = MODELS[model]
    num_images = min(65536, DATA_BYTES // (in_channels * size * size))
    return Case(model, batch, precision, size, in_channels, num_classes, max(num_images, 16 * batch))


def label(job: Job) -> str:
    """A variant, with the lanes of this engine."""
    return f"{OURS}, {job.lanes} lane{'s' * (job.lanes > 1)}" if job.variant == OURS else job.variant


def ours(records: dict[str, Record]) -> dict[str, Record]:
    """This engine's records, by label."""
    return {name: record for name, record in records.items() if name.startswith(OURS) and record.n}


def measure(job: Job, limit_s: float) -> Record:
    """A variant on a case, as a record in img/s."""
    case = job.case
    start = time.perf_counter()
    result = time_apart(job, limit_s)
    elapsed_s = round(time.perf_counter() - start, 1)
    name = f"{case.model} B={case.batch} {case.precision}: {label(job)}"
    details: dict[str, Any] = {"elapsed_s": elapsed_s, "num_images": case.num_images}
    if job.variant == OURS:
        details["lanes"] = job.lanes
    if "reason" in result:
        print(f"{name}: {result['reason']} ({elapsed_s} s)", flush=True)
        return replace(make_record(name, [0.0], "img/s", reason=result["reason"], **details), n=0)
    seconds = result.pop("seconds")
    step_ms = round(1e3 * statistics.median(seconds), 4)
    record = make_record(
        name, [case.batch / value for value in seconds], "img/s", step_ms=step_ms, **result, **details
    )
    print(f"{name}: {record.value:,.0f} img/s, {step_ms} ms a step ({elapsed_s} s)", flush=True)
    return record


def best_stock(records: dict[str, Record]) -> str | None:
    """The fastest of the others."""
    others = [name for name, record in records.items() if record.n and name not in ours(records)]
    return max(others, key=lambda name: records[name].value, default=None)


def collect(found: dict[Case, dict[str, Record]]) -> list[Record]:
    """All records, and for each case this engine's ratios."""
    every = [record for records in found.values() for record in records.values()]
    for case, records in found.items():
        best = best_stock(records)
        for name, own in ours(records).items() if best else ():
            over = {
                other: round(own.value / record.value, 3) for other, record in records.items() if record.n
            }
            title = f"{case.model} B={case.batch} {case.precision}: {name} over the best stock"
            ratio = make_record(title, [own.value / records[best].value], "x", best_stock=best, over=over)
            low, high = records[best].spread
            every.append(replace(ratio, n=own.n, spread=(own.spread[0] / high, own.spread[1] / low)))
    return every


def make_table(case: Case, records: dict[str, Record]) -> Table:
    best, own = best_stock(records), ours(records)
    first = next(iter(own), OURS)
    table = Table(title=f"{case.model}, B = {case.batch}, {case.precision}, {case.size}×{case.size}")
    table.add_column("variant", no_wrap=True)
    for heading in ("img/s", "lowest … highest", "step ms", "peak MiB", f"{first} ÷ it"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, record in records.items():
        title = f"{name} (best stock)" if name == best else name
        if not record.n:
            reason = str(record.details["reason"])
            table.add_row(title, "–", reason if len(reason) <= 24 else f"{reason[:23]}…", style="dim")
            continue
        low, high = record.spread
        ratio = f"{own[first].value / record.value:.2f} ×" if own else "–"
        cells = f"{record.value:,.0f}", f"{low:,.0f} … {high:,.0f}", f"{record.details['step_ms']:.3f}"
        style = "bold" if name in own or name == best else None
        table.add_row(title, *cells, f"{record.details['peak_mib']:,.0f}", ratio, style=style)
    return table


def draw(found: dict[Case, dict[str, Record]], path: Path) -> Path:
    """Bars of img/s on a log scale, grouped by case; a thin line is the spread."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    cases = list(found)
    names = list(dict.fromkeys(name for r in found.values() for name, record in r.items() if record.n))
    mine = dict(zip((name for name in names if name.startswith(OURS)), OUR_COLORS, strict=False))
    figure = Figure(figsize=(max(7.5, 1.2 + 0.32 * len(cases) * (len(names) + 1) + 2.4), 4.8), dpi=120)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    width = 0.86 / max(len(names), 1)
    for number, name in enumerate(names):
        places = [at for at, case in enumerate(cases) if name in found[case] and found[case][name].n]
        records = [found[cases[at]][name] for at in places]
        x = [at + (number - (len(names) - 1) / 2) * width for at in places]
        values = [record.value for record in records]
        spread = [[r.value - r.spread[0] for r in records], [r.spread[1] - r.value for r in records]]
        axes.bar(x, values, 0.92 * width, color=mine.get(name) or COLORS.get(name), label=name, yerr=spread,
                 error_kw={"linewidth": 0.8, "ecolor": "#333333"})  # fmt: skip
        for at, record in zip(x, records, strict=True):
            axes.annotate(short(record.value), (at, record.spread[1]), (0, 3), rotation=90, fontsize=7.5,
                          textcoords="offset points", ha="center", va="bottom")  # fmt: skip
    several = len({case.model for case in cases}) > 1
    labels = [f"{case.model}\nB = {case.batch}" if several else f"B = {case.batch}" for case in cases]
    axes.set_xticks(range(len(cases)), labels)
    axes.set_ylabel("img/s, log scale")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    values = [record.value for records in found.values() for record in records.values() if record.n]
    if values:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.set_ylim(0.5 * min(values), 2.2 * max(values))
        figure.legend(loc="outside right center", frameon=False, fontsize=8.5)
        record = next(r for records in found.values() for r in records.values() if r.n)
        models = ", ".join(dict.fromkeys(case.model for case in cases))
        title = f"{models}, {cases[0].precision}: a whole training step, median of {record.n}"
        axes.set_title(f"{title}\n{record.hardware}, torch {record.versions['torch']}", fontsize=9.5)
    figure.savefig(path)
    return path


def short(value: float) -> str:
    """1234567 as 1.23M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


if __name__ == "__main__":
    main()
