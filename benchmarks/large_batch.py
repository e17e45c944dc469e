"""Accuracy by batch size of `momentum` with the linear rule, `lars` and `lamb`, tuned alike.

python benchmarks/large_batch.py fashion --batches 256,1024,4096,16384 -o data.dir=DIR -o train.epochs=40

For each optimizer and batch three rates are tried, a factor of two apart, and further ones while the best is
at an edge; the best by validation images, with seed 0, is trained with other seeds. Accuracy is that of test
images. The linear rule takes the best rate at the smallest batch, times the batch over it; `--linear-only`
leaves out `momentum` with rates of its own at larger batches.

`--add` tunes further batches for a record that is there, whose rows stay: it begins at the best rates of the
largest batch there that is smaller.
"""

from __future__ import annotations

import json
from pathlib import Path

from many_runs import Key, ManyRuns
from measure import RESULTS, make_parser, make_record

from lockstep.spec import Record
from lockstep.spec.record import read_records, write_records

# at a batch of 256: the first rate that is tried, the power of the batch by which it grows, what else is set
CENTERS = {
    "momentum": (0.1, 1.0, ()),
    "lars": (4.0, 0.25, ()),
    "lamb": (0.008, 0.25, ("optimizer.weight_decay=0.01",)),
}
MOST = 5  # further rates at an edge
CHANCE = 0.2  # a run below it has learned nothing: its rate was too high


class Experiment:
    """The runs of one recipe."""

    def __init__(self, runs: ManyRuns, recipe: str, overrides: tuple[str, ...], seeds: int) -> None:
        self._runs, self._recipe, self._overrides, self._seeds = runs, recipe, overrides, seeds

    def key(self, name: str, batch: int, rate: float, seed: int) -> Key:
        """A run."""
        what = f"optimizer.name={name}", f"optimizer.lr={rate:.6g}", f"train.batch={batch}", f"seed={seed}"
        return (self._recipe, *self._overrides, *CENTERS[name][2], *what)

    def tune(self, starts: dict[tuple[str, int], float]) -> dict[tuple[str, int], float]:
        """The best rate of each optimizer and batch, beginning at `starts`, by validation images."""
        tried = {place: [rate / 2, rate, rate * 2] for place, rate in starts.items()}
        for _ in range(MOST + 1):
            self._runs.train(self.key(*place, rate, 0) for place, rates in tried.items() for rate in rates)
            if not all(self._known(place, rates) for place, rates in tried.items()):
                raise SystemExit("no time left to choose rates: the same command goes on")
            for place, rates in tried.items():
                best = self._best(place, rates)
                if best == min(rates) or self._accuracy(place, best) < CHANCE:
                    rates.append(min(rates) / 2)
                elif best == max(rates):
                    rates.append(best * 2)
        return {place: self._best(place, rates) for place, rates in tried.items()}

    def _best(self, place: tuple[str, int], rates: list[float]) -> float:
        return max(self._known(place, rates), key=lambda rate: self._accuracy(place, rate))

    def _accuracy(self, place: tuple[str, int], rate: float) -> float:
        return sum(self._runs.known([self.key(*place, rate, 0)], "accuracy"))

    def _known(self, place: tuple[str, int], rates: list[float]) -> list[float]:
        return [rate for rate in rates if self.key(*place, rate, 0) in self._runs.found]

    def finish(self, chosen: dict[tuple[str, str, int], float]) -> list[Record]:
        """A record of each line, optimizer and batch, with seeds other than that of the tuning."""
        keys = {
            (line, batch): [self.key(name, batch, rate, seed) for seed in range(1, self._seeds + 1)]
            for (line, name, batch), rate in chosen.items()
        }
        self._runs.train(key for seed in range(self._seeds) for row in keys.values() for key in [row[seed]])
        found = []
        for (line, name, batch), rate in chosen.items():
            values = [100 * value for value in self._runs.known(keys[line, batch], "test_accuracy")]
            if values:
                title = f"{self._recipe}: test accuracy, {line}, B = {batch}"
                told = {"line": line, "optimizer": name, "batch": batch, "lr": rate, "each": values}
                found.append(make_record(title, values, "%", recipe=self._recipe, **told))
        return found


class Chosen:
    """Best rates that are known, by optimizer and batch, and where the search for others begins."""

    def __init__(self, records: list[Record]) -> None:
        rows = [record.details for record in records if record.details["line"] != "linear rule"]
        self.rates: dict[tuple[str, int], float] = {
            (row["optimizer"], row["batch"]): row["lr"] for row in rows
        }

    def start(self, name: str, batch: int) -> float:
        """The best rate of the largest known batch below this one; else one that grows with the batch."""
        rate, power, _ = CENTERS[name]
        known = [each for optimizer, each in self.rates if optimizer == name and each < batch]
        return self.rates[name, max(known)] if known else rate * float(batch / 256) ** power


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("recipe")
    parser.add_argument("--batches", default="256,1024,4096,16384")
    parser.add_argument("--linear-only", action="store_true", help="of momentum at larger batches")
    parser.add_argument("--add", action="store_true", help="further batches, to the record that is there")
    parser.add_argument("--optimizers", default=",".join(CENTERS), help="default: all three")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after this time")
    parser.add_argument("--kept", type=Path, default=Path("large-batch.jsonl"), help="results so far")
    parser.add_argument("--validation", default="data.val_fraction=0.1", help="how images are held out")
    parser.add_argument("-o", "--override", action="append", default=[])
    options = parser.parse_args()
    output = options.output or RESULTS / f"large-batch-{options.recipe}.json"
    overrides = (*options.override, options.validation)
    batches = list(map(int, options.batches.split(",")))
    there = read_records(output) if options.add else []
    known = Chosen(there)
    first = min([batches[0], *(batch for _, batch in known.rates)])
    with ManyRuns(options.kept, options.jobs, options.seconds) as runs:
        experiment = Experiment(runs, options.recipe, overrides, options.seeds)
        starts = {
            (name, batch): known.start(name, batch)
            for name in options.optimizers.split(",")
            for batch in batches
            if (name, batch) not in known.rates
            and (batch == first or name != "momentum" or not options.linear_only)
        }
        best = experiment.tune(starts)
        print(json.dumps({f"{name}, {batch}": rate for (name, batch), rate in best.items()}), flush=True)
        chosen = {(name, name, batch): rate for (name, batch), rate in best.items()}
        base = {**known.rates, **best}.get(("momentum", first))
        lines = {(record.details["line"], record.details["batch"]) for record in there}
        for batch in batches:
            if base and batch > first and ("linear rule", batch) not in lines:
                chosen["linear rule", "momentum", batch] = base * batch / first
        records = [*there, *experiment.finish(chosen)]
    for record in records:
        print(f"{record.name}: {record.value:.2f} {record.spread} n = {record.n}")
    write_records(output, records)


if __name__ == "__main__":
    main()
