"""How many epochs `muon` needs for the accuracy that the best recipe with `nag` has after all of its own.

python benchmarks/muon_epochs.py --epochs 20 --shares 0.85,0.7 -o data.dir=DIR

Rates and weight decay of both are chosen by validation images with seed 0; then all are trained with other
seeds on all training images, and test images are counted once.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from many_runs import Key, ManyRuns
from measure import RESULTS, make_parser, make_record

from lockstep.spec.record import write_records

NAG = [("optimizer.name=nag", f"optimizer.lr={lr}") for lr in (0.1, 0.2, 0.4)]
MUON = [
    ("optimizer.name=muon", "train.batch=512", f"optimizer.lr={lr}", f"optimizer.weight_decay={decay}")
    for lr, decay in itertools.product((0.02, 0.05), (0.02, 0.1))
]


def main() -> None:
    parser = make_parser(__doc__, None)
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--epochs", type=int, default=20, help="of nag")
    parser.add_argument("--shares", default="0.85", help="of these epochs, for muon")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after this time")
    parser.add_argument("--kept", type=Path, default=Path("muon-epochs.jsonl"), help="results so far")
    parser.add_argument("-o", "--override", action="append", default=[])
    options = parser.parse_args()
    shares = [round(float(share) * options.epochs) for share in options.shares.split(",")]

    def key(settings: tuple[str, ...], epochs: int, *more: str) -> Key:
        return (options.recipe, *options.override, *settings, f"train.epochs={epochs}", *more)

    with ManyRuns(options.kept, options.jobs, options.seconds) as runs:
        tried = {
            settings: key(settings, epochs, "data.val_fraction=0.1", "seed=0")
            for epochs, some in ((options.epochs, NAG), (shares[0], MUON))
            for settings in some
        }
        runs.train(tried.values())
        found = {settings: runs.known([row], "accuracy") for settings, row in tried.items()}
        if not all(found.values()):
            raise SystemExit("no time left to choose: the same command goes on")
        nag, muon = (max(some, key=lambda settings: found[settings]) for some in (NAG, MUON))
        sets = {f"nag, {options.epochs} epochs": (nag, options.epochs)}
        sets |= {f"muon, {epochs} epochs": (muon, epochs) for epochs in shares}
        rows = {
            name: [key(*what, f"seed={seed}") for seed in range(1, options.seeds + 1)]
            for name, what in sets.items()
        }
        runs.train(row[number] for number in range(options.seeds) for row in rows.values())
        records = []
        for name, row in rows.items():
            values = [100 * value for value in runs.known(row, "accuracy")]
            if values:
                settings, told = sets[name][0], {"mean": sum(values) / len(values), "each": values}
                title = f"{options.recipe}: test accuracy, {name}"
                records.append(make_record(title, values, "%", settings=list(settings), **told))
    for record in records:
        print(f"{record.name}: {record.details['mean']:.2f} {record.spread} n = {record.n}")
    write_records(options.output or RESULTS / "muon-epochs-gpu.json", records)


if __name__ == "__main__":
    main()
