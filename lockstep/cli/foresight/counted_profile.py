"""A run's Profile: from a file or, without a measurement, counted; for published sets without their data."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from lockstep.errors import BadInput, LockstepError
from lockstep.planner.remembered import recall_profile
from lockstep.spec import Run
from lockstep.spec.profile import Profile, read_profile

Facts = tuple[tuple[int, int, int], int, int]  # the shape of an image, classes, training images
_PUBLISHED: dict[str, Facts] = {
    "cifar10": ((3, 32, 32), 10, 50_000),
    "mnist": ((1, 28, 28), 10, 60_000),
    "fashion": ((1, 28, 28), 10, 60_000),
}
_IMAGENET = (1000, 1_281_167)


def find_profile(options: argparse.Namespace, run: Run, device: str) -> Profile:
    """By --profile, else as `lockstep profile` measured it on such a device before, else counted."""
    from lockstep.train.foresight.own_prediction import count_profile

    if options.profile:
        profile = read_own_profile(options.profile, run)
        if run.data.name in ("folder", "pack") and not options.images:
            return profile
        facts = _find_facts(run, options.classes or profile.classes, options.images, False)
        return replace(profile, train_images=facts[2])
    shape, classes, images = _find_facts(run, options.classes, options.images, options.recipe == "imagenet")
    if kept := recall_profile(run, shape, device):
        print("lockstep: with what `lockstep profile` measured of this run before", file=sys.stderr)
        return replace(kept, train_images=images)
    return count_profile(run, shape, classes, images)


def read_own_profile(path: Path, run: Run) -> Profile:
    """A profile's file; refused if it is of something else than the run."""
    profile = read_profile(path)
    for key, own, its in (
        ("model.name", run.model.name, profile.model),
        ("train.precision", run.train.precision, profile.precision),
    ):
        if own != its:
            raise BadInput(f"--profile {path} is of {key}={its}, and the run has {own}: measure it again")
    return profile


def count_run(run: Run, classes: int = 0, images: int = 0, is_imagenet: bool = False) -> Profile:
    """What the layers of a run's model compute and hold."""
    from lockstep.train.foresight.own_prediction import count_profile

    return count_profile(run, *_find_facts(run, classes, images, is_imagenet))


def _find_facts(run: Run, classes: int, images: int, is_imagenet: bool) -> Facts:
    if run.data.name in _PUBLISHED and not run.data.options:
        shape, known, count = _PUBLISHED[run.data.name]
        return shape, classes or known, images or count
    if run.data.name not in ("folder", "pack") or run.data.dir:
        from lockstep.data import open_data

        try:
            store = open_data(run)
            return store.shape, classes or len(store.classes), images or len(store.train)
        except LockstepError:
            if not classes:
                raise
    if is_imagenet:
        classes, images = classes or _IMAGENET[0], images or _IMAGENET[1]
    if not classes or not images:
        raise BadInput(
            f"the images of data.name={run.data.name} are not here: give --classes and --images, or "
            "-o data.dir=DIR"
        )
    size, channels = (
        int(run.data.options.get(key, known)) for key, known in (("size", 224), ("channels", 3))
    )
    return (channels, size, size), classes, images
