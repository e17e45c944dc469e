"""Test accuracy of a recipe under several sets of settings, with the same seeds, side by side.

python benchmarks/accuracy_sets.py cifar10 --seeds 5 --name "compression" --output FILE -o data.dir=DIR \\
    --set plain --set "int8: train.compress=int8" --set "muon, 17: optimizer.name=muon train.epochs=17"

Sets of settings were chosen before, by validation images: `--split val` is for choosing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ddp_peer import HOOKS, sent_bytes
from hook_accuracy import WORKERS, own_bytes, weight_shapes
from many_runs import Key, ManyRuns
from measure import RESULTS, make_parser, make_record

import lockstep
from lockstep.cli.train import resolve
from lockstep.spec.record import write_records


def fewer_bytes(key: Key) -> float:
    """What DDP sends in a step of four workers, over what such a run's workers send of gradients."""
    recipe, *overrides = key
    launch = lockstep.Launch(quiet=True)
    run = resolve(argparse.Namespace(recipe=recipe, config=None, override=overrides), launch)[0]
    shapes = weight_shapes(run)
    return sent_bytes(shapes, HOOKS[0], WORKERS) / own_bytes(shapes, run.train.compress, WORKERS)


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("recipe")
    parser.add_argument("--name", required=True)
    parser.add_argument("--set", action="append", required=True, metavar="NAME: KEY=VALUE …")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--split", choices=("test", "val"), default="test")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after this time")
    parser.add_argument("--kept", type=Path, default=Path("accuracy-sets.jsonl"), help="results so far")
    parser.add_argument("--validation", default="data.val_fraction=0.1", help="how images are held out")
    parser.add_argument("-o", "--override", action="append", default=[])
    options = parser.parse_args()
    what = "accuracy"
    common = (*options.override, *([options.validation] if options.split == "val" else []))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    keys: dict[str, list[Key]] = {}
    for text in options.set:
        name, _, settings = text.partition(":")
        keys[name] = [(options.recipe, *common, *settings.split(), f"seed={seed}") for seed in seeds]
    with ManyRuns(options.kept, options.jobs, options.seconds) as runs:
        runs.train(key for number in range(len(seeds)) for row in keys.values() for key in [row[number]])
        records = []
        for name, row in keys.items():
            values = [100 * value for value in runs.known(row, what)]
            if values:
                title = f"{options.recipe}, {options.name}: {options.split} accuracy, {name}"
                fewer = fewer_bytes(row[0])
                details = {"fewer_bytes": fewer, "set": name, "settings": list(row[0][1:-1]), "each": values}
                records.append(make_record(title, values, "%", mean=sum(values) / len(values), **details))
    for record in records:
        print(f"{record.name}: {record.details['mean']:.2f} {record.spread} n = {record.n}")
    write_records(options.output or RESULTS / f"accuracy-{options.name}-{options.recipe}.json", records)


if __name__ == "__main__":
    main()
