"""`lockstep data show`: a sheet of a run's training images, as the network will see them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_run_keys, check_new_file
from lockstep.cli.train import named_file, resolve
from lockstep.errors import BadInput
from lockstep.spec import Launch

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.data import Store
    from lockstep.data.augment import Augment

_TEXT = """\
Draw a sheet of a run's training images, as the network will see them: after crops, changes of colour, mixing
and normalization (undone for the eye), with their labels. Recipe and keys are as in `lockstep train`:

  lockstep data show folder -o data.dir=PHOTOS -o data.augment=random_resized_crop,flip,rand_augment,mixup

The images are those of the first steps of --epoch, in the order in which they are trained on.
"""


def add_show(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action and its flags."""
    parser = actions.add_parser(
        "show",
        help="draw training images as the network will see them",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_keys(parser)
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="which epoch, from 0; default: 0")
    parser.add_argument("--images", type=int, default=32, metavar="N", help="how many; default: 32")
    parser.add_argument(
        "--output", type=Path, default=Path("images.png"), metavar="FILE.png", help="default: images.png"
    )
    parser.set_defaults(handler=show_images)


def show_images(options: argparse.Namespace) -> int:
    """Read the images, draw them, and say where they are."""
    if options.epoch < 0 or not 1 <= options.images <= 1024:
        raise BadInput("--epoch counts from 0, and --images is from 1 to 1024")
    check_new_file(options.output, "--output")
    run = resolve(options, Launch())[0].at(options.epoch)
    from itertools import islice

    import torch

    from lockstep.data import open_data
    from lockstep.data.augment import check_augment, make_augment
    from lockstep.data.images.size_stage import SizeStages
    from lockstep.data.loader import TrainLoader
    from lockstep.report.image_sheet import draw_sheet

    torch.set_num_threads(1)
    with named_file(options):
        store = open_data(run)
        check_augment(run, store)

    def make(shape: tuple[int, int, int]) -> Augment:
        return make_augment(run, shape, store.mean, store.std, train=store.train)

    augment = make(store.shape)
    batch = min(run.train.batch, len(store.train) // run.train.lanes * run.train.lanes)
    loader = TrainLoader(store.train, augment, batch=batch, lanes=run.train.lanes, device=torch.device("cpu"))
    loader.stages = SizeStages(store, make) if store.sizes else None
    steps = list(islice(loader.epoch(options.epoch), -(-options.images // batch)))
    turns = torch.arange(batch).view(run.train.lanes, -1).t().flatten()  # lanes take turns, as samples do
    images = torch.cat([lanes.images[turns] for lanes in steps])[: options.images]
    labels = torch.cat([lanes.labels[turns] for lanes in steps])[: options.images]
    scale, shift = augment.normal(images.byte())
    pixels = ((images + shift.view(-1, 1, 1)) / scale.view(-1, 1, 1)).round().clamp(0, 255).byte()
    draw_sheet(pixels.permute(0, 2, 3, 1).numpy(), [_name(store, label) for label in labels], options.output)
    print(f"{len(pixels)} images of {run.data.name}, epoch {options.epoch}: {options.output}")
    return 0


def _name(store: Store, label: Tensor) -> str:
    """The class of a sample, or both classes of a mixed one with the first one's share; or its values."""
    if store.has_values:
        return ", ".join(
            f"{name} {value:g}" for name, value in zip(store.classes, label.tolist(), strict=True)
        )
    if label.dim() == 0:
        return store.classes[int(label)]
    from lockstep.kernels.loss import WHOLE_SHARE

    own, partner, share = label.tolist()
    return f"{store.classes[own]} {share / WHOLE_SHARE:.2f} + {store.classes[partner]}"
