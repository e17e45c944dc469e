"""`lockstep layers`: how a plan deals a model's layers to workers, without starting any."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lockstep.cli.flag import add_run_keys
from lockstep.cli.train import named_file, resolve_steps
from lockstep.errors import BadInput
from lockstep.spec import Launch, Run
from lockstep.spec.plan import Plan, read_plan
from lockstep.spec.plan_check import check_layers

if TYPE_CHECKING:
    from lockstep.parallel.split.split_graph import SplitGraph

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXT = """\
Show how the layers of a run's model are dealt to the workers that share a lane:

  lockstep layers cifar10 -o train.bands=2 --plan channel=2,spatial=2

For each call of the model at the shape of the run's lanes: the rule that it falls under, the rows and the
channels of its output that one worker has, its share of all multiplications, forward and backward, and how
much of that is cut along all axes of the plan. What is not cut along an axis is computed by every worker
along it: exact, but not faster; the rule says why.

No worker is started and nothing is trained. Whether kernels give the same bits in parts is tried here for
rows, as at the start of a run. A run under a plan also tries every layer in the parts that its workers have,
and may leave more of them whole; it says so at its start, and `layers` in its summary.json has what came out.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "layers",
        help="show how a plan deals a model's layers to workers",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_keys(parser)
    parser.add_argument(
        "--plan",
        required=True,
        metavar="SPEC|FILE",
        help="with spatial (rows of an image over workers; needs train.bands of as many or more), channel "
        "(channels of a layer), or both; other axes are ignored",
    )
    parser.set_defaults(handler=show_layers)


def show_layers(options: argparse.Namespace) -> int:
    """Print the table."""
    plan = read_plan(options.plan)
    run = resolve_steps(options, Launch())
    if not plan.splits_layers:
        raise BadInput(f"layers: --plan {plan} cuts no layer: give spatial, channel or both, as in channel=2")
    with named_file(options):
        check_layers(plan, "--plan", run)
    if run.kernels.set in ("fused", "compiled"):
        raise BadInput(
            f"layers: kernels.set={run.kernels.set} deals out tiles or channels of products, as a run says "
            "at its start: use kernels.set=stock here, or start the run"
        )
    graph = _choose(run, plan)
    from lockstep.parallel.split.layer_report import layer_rows, list_cells, part_sizes, tell_layers

    rows, sizes = layer_rows(graph), part_sizes(graph)
    total = sum(row["work_mmac"] for row in rows) or 1.0
    cut = "over both" if plan.spatial > 1 < plan.channel else "cut"
    table: list[tuple[str, ...]] = [("layer", "rule", "rows", "channels", "work", cut)]
    table += [_line(row, sizes[row["layer"]], total) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    train = run.train
    print(f"\n{tell_layers(graph)}")
    print(
        f"{run.model.name}, lanes of {train.batch // train.lanes} images, {train.precision}, "
        f"train.bands={train.bands}, train.slices={train.slices}, {total:,.1f} million multiplications a "
        "lane; a run may leave more whole, where its kernels give other bits in a worker's part"
    )
    cells = list_cells(graph)
    if cells:
        print(f"computed in cells, by one worker too, for its kernels: {', '.join(cells)}")
    return 0


def _choose(run: Run, plan: Plan) -> SplitGraph:
    """The run's model, dealt to workers that are not there."""
    from lockstep.data import open_data
    from lockstep.kernels.numerics import half_type, plain_torch, prepare_device, to_device
    from lockstep.lower.fixed_lane import fixed_images
    from lockstep.models import build_model
    from lockstep.parallel.split.axes import Axes
    from lockstep.parallel.split.split_model import plan_model

    train = run.train
    with plain_torch():
        device = prepare_device("auto", train.threads, tf32=train.precision == "tf32")
        store = open_data(run)
        model = to_device(build_model(run, store.shape, len(store.classes)), device, run)
        images = fixed_images(run, store.shape, device)
        axes = Axes.planned(train.bands, train.slices, plan.channel, plan.spatial)
        return plan_model(model, axes, images, half_type(train.precision))


def _line(row: dict[str, Any], sizes: tuple[str, str], total: float) -> tuple[str, ...]:
    work = row["work_mmac"]
    shares = f"{100 * work / total:.1f} %" if work else "", f"{100 * row['share']:.0f} %" if work else ""
    return (row["layer"], row["rule"], *sizes, *shares)
