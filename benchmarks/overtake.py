"""Where communication overtakes compute: AlexNet and GoogLeNet with data alone, on several nodes.

python benchmarks/overtake.py --picture docs/overtake.png

Predicted by `lockstep plan`'s closed form from presets, at the batches of the papers (256 and 32): the
seconds a step computes and, were nothing hidden, exchanges, by the number of workers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import make_parser, make_record

import lockstep
from lockstep.cli.foresight.counted_profile import count_run
from lockstep.planner.cost import StepCost
from lockstep.planner.preset import find_cluster
from lockstep.planner.search import judge
from lockstep.spec import Model, Run
from lockstep.spec.plan import Plan
from lockstep.spec.profile import Profile
from lockstep.spec.record import write_records

BATCHES = {"alexnet": 256, "googlenet": 32}
PRESETS = ("4xK80", "8xP100", "8xA100", "8xH100", "cpu-1g", "cpu-10g")


def main() -> None:
    parser = make_parser(__doc__, "foresight-overtake.json")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found: dict[tuple[str, str], dict[int, StepCost]] = {}
    records: list[Any] = []
    for name, batch in BATCHES.items():
        run = replace(lockstep.recipe("imagenet"), model=Model(name))
        run = replace(run, train=replace(run.train, batch=batch, lanes=batch, precision="fp32"))
        profile = count_run(run, is_imagenet=True)
        for preset in PRESETS:
            costs = {
                w: cost_of(run, profile, preset, w) for w in (1, 2, 4, 8, 16, 32, 64, 128, 256) if w <= batch
            }
            found[name, preset] = costs
            turn = next((w for w, cost in costs.items() if exchange(cost) > cost.compute_s), 0)
            title = (
                f"{name}, batch {batch}, {preset}: the fewest workers whose exchange is longer than computing"
            )
            seconds = {w: [round(c.compute_s, 6), round(exchange(c), 6)] for w, c in costs.items()}
            records.append(make_record(title, [turn], "workers", compute_and_exchange_s=seconds))
            print(f"{title}: {turn or 'none'}")
    write_records(options.output, records)
    if options.picture:
        draw(options.picture, found)


def cost_of(run: Run, profile: Profile, preset: str, workers: int) -> StepCost:
    """A step by so many workers, a lane of equal size for each."""
    train = replace(run.train, lanes=workers)
    return judge(replace(run, train=train), profile, find_cluster(preset), Plan(data=workers)).cost


def exchange(cost: StepCost) -> float:
    return cost.exposed_s + cost.hidden_s


def draw(path: Path, found: dict[tuple[str, str], dict[int, StepCost]]) -> None:
    """A panel for each cluster: computing falls, the exchange does not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3, sharex=True).flat
    colors = {"alexnet": "#4477aa", "googlenet": "#cc6677"}
    for axes, preset in zip(panels, PRESETS, strict=True):
        for name, batch in BATCHES.items():
            costs = found[name, preset]
            label = f"{name}, batch {batch}: computing"
            axes.plot(list(costs), [1e3 * c.compute_s for c in costs.values()], "o-", color=colors[name],
                      markersize=3, label=label)  # fmt: skip
            several = [w for w in costs if w > 1]
            axes.plot(several, [1e3 * exchange(costs[w]) for w in several], "s--", color=colors[name],
                      markersize=3, label=f"{name}: exchange")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(preset, fontsize=10)
        axes.set_xlabel("workers", fontsize=8)
        axes.set_ylabel("milliseconds a step", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
