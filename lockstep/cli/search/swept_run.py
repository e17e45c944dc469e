"""A run of a sweep; all of them are resolved and checked before the first one starts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.data_action.folder_defaults import check_imagenet
from lockstep.cli.train import named_file, resolve
from lockstep.errors import BadInput, LockstepError, SpecError
from lockstep.spec import Launch, Run
from lockstep.spec.run_file import write_value
from lockstep.spec.search.halving import rung_epochs
from lockstep.spec.search.sweep import Point, Sweep

if TYPE_CHECKING:
    from lockstep.data import Store

_HELD_OUT = {"shapes": "num_val=1000", "mnist": "val_fraction=0.1"}
_HELD_OUT |= dict.fromkeys(("fashion", "cifar10"), _HELD_OUT["mnist"])


@dataclass(frozen=True)
class SweptRun:
    """One combination with one seed, and the directory of its run."""

    name: str
    combination: str  # the same for all seeds
    point: Point
    seed: int | None  # None: the Run's own
    words: tuple[str, ...]  # KEY=VALUE, what `lockstep train` gets by -o
    run: Run
    path: Path
    images: int  # to train on
    rungs: tuple[int, ...]  # epochs after which it is compared with others; the last are all

    def steps(self, epochs: int) -> int:
        """The steps of the first epochs."""
        return sum(stage.steps(self.images, range(epochs)) for stage in self.run.train.stages)

    @property
    def is_finished(self) -> bool:
        return (self.path / "summary.json").is_file()


def make_runs(sweep: Sweep, options: argparse.Namespace, folder: Path) -> list[SweptRun]:
    """All runs, checked; an error names the combination."""
    maker, found = _Maker(sweep, options, folder), list[SweptRun]()
    for point in sweep.points():
        for seed in sweep.seeds or (None,):
            try:
                found.append(maker.make(point, seed))
            except LockstepError as error:
                error.args = (f"combination {sweep.name(point, seed)}: {error}", *error.args[1:])
                raise
    return found


class _Maker:
    """Makes runs, and refuses what `lockstep train` would, as far as that shows without training."""

    def __init__(self, sweep: Sweep, options: argparse.Namespace, folder: Path) -> None:
        self._sweep, self._options, self._folder = sweep, options, folder
        self._launch = Launch(device=options.device, workers=options.workers)
        self._stores: dict[str, Store] = {}
        self._built: set[str] = set()  # models, each with its data

    def make(self, point: Point, seed: int | None) -> SweptRun:
        sweep, swept = self._sweep, point if seed is None else {**point, "seed": seed}
        words = (*sweep.overrides, *(f"{key}={write_value(value)}" for key, value in swept.items()))
        given = argparse.Namespace(recipe=sweep.recipe, config=self._options.config, override=list(words))
        run, _ = resolve(given, Launch(quiet=bool(self._stores) or self._options.json))
        name = sweep.name(point, seed)
        path, combination = self._folder / name, sweep.name(point) or "the Run"
        with named_file(given):
            self._launch.check_run(run)
            store = self._check_parts(run)
            rungs = _find_rungs(run, store, sweep)
        if path.exists() and not (path / "identity.json").is_file():
            raise BadInput(f"{path} is there, and is no run (it has no identity.json): remove it")
        return SweptRun(name, combination, point, seed, words, run, path, len(store.train), rungs)

    def _check_parts(self, run: Run) -> Store:
        """Open its data set, build its model; refuse what does not go together."""
        from lockstep.data import open_data
        from lockstep.data.augment import check_augment
        from lockstep.data.store import check_batch
        from lockstep.kernels.numerics import check_device
        from lockstep.train.start_model import make_model

        check_device(self._options.device)
        if self._sweep.recipe == "imagenet":
            check_imagenet(run)
        data, model = repr(run.data), repr((run.data, run.model))
        store = self._stores[data] = self._stores.get(data) or open_data(run)
        check_batch(store, run.train)
        check_augment(run, store)
        if store.has_values:
            raise SpecError(f"a sweep compares accuracies, and runs on the values of {store.name} have none")
        if model not in self._built:
            make_model(run, store, None, {}, [])
            self._built.add(model)
        return store


def _find_rungs(run: Run, store: Store, sweep: Sweep) -> tuple[int, ...]:
    if not sweep.rungs:
        return (run.train.epochs,)
    name = run.data.name
    if run.evaluate.patience:
        raise SpecError(
            f"--search halving: not with evaluate.patience={run.evaluate.patience}, as it ends runs itself: "
            "leave one of them out"
        )
    if store.chosen_by[0] != "val":
        fix = f"hold some out: -o data.{_HELD_OUT[name]}" if name in _HELD_OUT else "give it a folder val/"
        raise SpecError(f"--search halving chooses by validation images, and {name} has none: {fix}")
    return tuple(rung_epochs(run.train.epochs, sweep.rungs, sweep.keep))
