"""Draws large-batch.png from the records of large_batch.py, and prints the table of large-batches.md.

python docs/large_batch.py
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lockstep.spec.record import Record, read_records

HERE = Path(__file__).parent
RECORDS = {
    "Fashion-MNIST, emotion48, 40 epochs": "large-batch-fashion.json",
    "CIFAR-10, ResNet-18, 16 epochs": "large-batch-cifar10.json",
}
LINES = {
    "linear rule": ("#ee6677", "momentum, linear rule"),
    "momentum": ("#ccbb44", "momentum, tuned"),
    "lars": ("#4477aa", "lars, tuned"),
    "lamb": ("#228833", "lamb, tuned"),
}
LEAST = {"fashion": 80.0, "cifar10": 30.0}  # percent; what is below is drawn at the edge


def main() -> None:
    """A table, and a plot for each data set."""
    figure = Figure(figsize=(6.4 * len(RECORDS), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, name) in zip(
        figure.subplots(1, len(RECORDS), squeeze=False)[0], RECORDS.items(), strict=True
    ):
        found = read_records(HERE.parent / "benchmarks" / "results" / name)
        print_table(title, found)
        draw(axes, title, found)
    figure.savefig(HERE / "large-batch.png", dpi=110)


def print_table(title: str, found: list[Record]) -> None:
    """A row for each batch; a run that did not learn is a dash."""
    table = {(each.details["line"], each.details["batch"]): each for each in found}
    print(f"\n{title}:\n\n| batch | {' | '.join(text for _, text in LINES.values())} |")
    print(f"|{'---|' * (1 + len(LINES))}")
    for batch in sorted({batch for _, batch in table}):
        cells = [tell(table.get((line, batch))) for line in LINES]
        print(f"| {batch:,} | {' | '.join(cells)} |")


def tell(record: Record | None) -> str:
    """The median and the spread of what has learned, and how many did not."""
    if record is None:
        return ""
    learned = sorted(value for value in record.details["each"] if value > 15)
    if not learned:
        return "fails"
    failed = record.n - len(learned)
    spread = f"{median(learned):.1f} % ({learned[0]:.1f}–{learned[-1]:.1f})"
    return f"{spread}, {failed} of {record.n} fail" if failed else spread


def draw(axes: Axes, title: str, found: list[Record]) -> None:
    """Accuracy by batch, a line for each way to choose the rate, a dot for each seed."""
    least = LEAST[found[0].details["recipe"]]
    for line, (colour, label) in LINES.items():
        rows = sorted((each for each in found if each.details["line"] == line), key=by_batch)
        batches = [by_batch(each) for each in rows]
        axes.plot(batches, [max(each.value, least) for each in rows], "-", color=colour, label=label)
        for each in rows:
            for value in each.details["each"]:
                mark, place = ("o", value) if value > least else ("x", least)
                axes.plot(by_batch(each), place, mark, color=colour, markersize=5, clip_on=False)
    batches = sorted({by_batch(each) for each in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set_ylim(least, 95)
    axes.set(title=title, xlabel="batch", ylabel=f"test accuracy, % (x: below {least:g} or not finite)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", frameon=False)


def by_batch(record: Record) -> int:
    """The batch of a record."""
    return int(record.details["batch"])


if __name__ == "__main__":
    main()
