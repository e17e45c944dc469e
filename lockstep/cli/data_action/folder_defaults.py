"""The recipes of one's own files: the defaults of `folder` for its images, and what `imagenet` must find."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.launch import find_main
from lockstep.errors import LockstepError, SpecError
from lockstep.recipes.folder_rule import choose_defaults, choose_finetuning
from lockstep.spec import Launch, Run
from lockstep.spec.run_file import Table, to_table

if TYPE_CHECKING:
    from lockstep.data.images.image_facts import ImageFacts

_DEFAULT = "data/folder"


def find_facts(run: Run) -> ImageFacts | None:
    """What is known of the images of a Run; None if there are none, which is reported when it is trained."""
    data = run.data
    folder = Path(data.dir or f"data/{data.name}")
    if data.name not in ("folder", "csv", "pack") or not folder.is_dir():
        return None
    from lockstep.data.catalog import make_options, open_store
    from lockstep.data.images.image_facts import measure_images

    make_options(data.name, data.options)  # wrong ones are refused here
    here = {key: value for key, value in data.options.items() if key != "decoder"}  # which may be elsewhere
    try:
        return measure_images(open_store(data.name, folder, here))
    except LockstepError:
        return None


def fit_folder(facts: ImageFacts, run: Run, recipe: str, name: str, launch: Launch) -> Table:
    """The layer of keys that these images decide for a recipe.

    A run that is resumed keeps what it began with, though its folder may have changed since.
    """
    import torch

    has_gpu = launch.device != "cpu" and torch.cuda.is_available()
    if recipe == "finetune":
        chosen = choose_finetuning(facts.num_train, has_gpu)
    else:
        chosen = choose_defaults(*facts, has_gpu=has_gpu)
    chosen["data"]["name"] = run.data.name
    before = _resumed(name, launch)
    before.get("data", {}).pop("name", None)  # a folder may have become a pack since
    for section, row in chosen.items():
        row |= {key: value for key, value in before.get(section, {}).items() if key in row}
    return chosen


def fit_weights(run: Run, name: str, launch: Launch) -> Table:
    """The layer of keys that the weights decide which a Run of the recipe `finetune` starts from."""
    keys = ("normalize", "size") if run.data.name in ("folder", "csv", "pack") else ("normalize",)
    if before := _resumed(name, launch):
        return {"data": {key: before["data"][key] for key in keys if key in before["data"]}}
    from lockstep.models.pretrained import PRETRAINED, TIMM, published_form
    from lockstep.models.weights_form import file_form

    name, weights = run.model.name, run.model.weights
    form = file_form(Path(weights)) if weights and weights != PRETRAINED else None
    if form is None and (weights == PRETRAINED or name.startswith(TIMM)):
        form = published_form(name)
    return {"data": {key: getattr(form, key) for key in keys}} if form else {}


def lay_fork(launch: Launch, layers: list[Table], tunes: bool) -> list[Table]:
    """The layers of a run that begins with the weights of another; one that `tunes` has its model, too."""
    from lockstep.runs.resume import find_directory, fork_weights

    model = to_table(find_directory(launch.runs_dir, launch.fork or "").run())["model"] if tunes else {}
    model.pop("freeze", None)
    return [{"model": model}, *layers, {"model": {"weights": str(fork_weights(launch))}}]


def _resumed(name: str, launch: Launch) -> Table:
    """What the run began with that is resumed; nothing if none is."""
    if not launch.resume:
        return {}
    from lockstep.runs.resume import find_resumed

    directory, _ = find_resumed(launch, launch.name or name)
    return to_table(directory.run()) if directory else {}


def tell_defaults(facts: ImageFacts, run: Run) -> None:
    """Say, by one process of a job, which images there are and what they have decided."""
    if not find_main():
        return
    train, optimizer = run.train, run.optimizer
    size = run.data.options.get("sizes") or run.data.options.get("size", facts.side)
    changes = "" if run.model.weights else ", and photographs of few a class are changed more"
    words = f"fewer images train longer{changes}"
    print(
        f"{facts}: {run.model.name} at {size} pixels, {train.epochs} epoch{'s' * (train.epochs > 1)}, "
        f"batch {train.batch} in {train.lanes} lane{'s' * (train.lanes > 1)}, {train.precision}, "
        f"{optimizer.name} with lr {optimizer.lr:g} and weight decay {optimizer.weight_decay:g}, "
        f"label smoothing {train.label_smoothing:g}, augmented by "
        f"{', '.join(run.data.augment) or 'nothing'}\n"
        f"{words}; -o KEY=VALUE changes each of these, --print-config shows all",
        file=sys.stderr,
        flush=True,
    )


def check_imagenet(run: Run) -> None:
    """Refuse a run of the recipe `imagenet` without its images, which cannot be fetched."""
    if run.data.name not in ("folder", "pack") or Path(run.data.dir or _DEFAULT).is_dir():
        return
    raise SpecError(
        f"data.dir={run.data.dir or ''}: the recipe imagenet needs -o data.dir=IMAGENET, a folder with "
        "train/n01440764/*.JPEG … and val/n01440764/*.JPEG …, a folder for each of the 1,000 classes; "
        "`lockstep data pack IMAGENET PACKED --size 256 --quality 90` makes a pack of it, for "
        "-o data.name=pack -o data.dir=PACKED"
    )
