"""`lockstep predict`: prints the most likely classes of image files, or their labels or numbers."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.flag import add_device, add_eval_workers, add_json, add_trained_run, eval_launch
from lockstep.cli.launch import start_users
from lockstep.cli.trained_run import joined_run, open_part, open_run
from lockstep.errors import BadInput, DataError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

    from torch import Tensor

    from lockstep.runs.trained_run import Trained

_TOP = 5


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    text = "the five most likely classes of image files, or their labels or numbers"
    parser = verbs.add_parser("predict", help=text, description=text.capitalize() + ".")
    add_trained_run(parser)
    add_device(parser)
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="PNG or JPEG files")
    add_json(parser)
    add_eval_workers(parser)
    parser.set_defaults(handler=predict)


def predict(options: argparse.Namespace) -> int:
    """Predict, alone or as one of several workers."""
    launch = start_users(eval_launch(options))
    if launch.world:
        with joined_run(launch, partial(open_part, options)) as joined:
            pictures = joined.agree(lambda: _read(joined.trained, options, joined.is_main))
            probabilities = joined.predict(pictures)
            for path, row in zip(options.images if joined.is_main else (), probabilities, strict=False):
                _tell(joined.trained, path, row, options)
        return 0
    from lockstep.runs.predictor import Predictor

    trained = open_run(options, options.device)
    pictures, predictor = _read(trained, options), Predictor(trained)
    for path, picture in zip(options.images, pictures, strict=True):
        _tell(trained, path, predictor(picture[None])[0], options)
    return 0


def _read(trained: Trained, options: argparse.Namespace, tells: bool = True) -> list[Tensor]:
    """Read all images, so that a bad file is reported before any work."""
    from lockstep.data.images.image_file import read_image

    missing = [str(path) for path in options.images if not path.is_file()]
    if missing:
        raise BadInput(f"no such file, or a folder: {', '.join(missing)}: give PNG or JPEG files")
    height, width = trained.shape[1:]
    pictures, bad = [], []
    for path in options.images:
        try:
            picture, size = read_image(path, trained.shape, trained.crop_pct)
        except DataError as error:
            bad.append(str(error))
            continue
        pictures.append(picture)
        if tells and size != (height, width):
            note = f"{path}: resized from {size[1]}×{size[0]} to {width}×{height}"
            print(note, file=sys.stderr)
    if bad:
        raise DataError("; ".join(bad))
    return pictures


def _tell(trained: Trained, path: Path, found: Tensor, options: argparse.Namespace) -> None:
    if trained.has_values:
        named = dict(zip(trained.classes, found.tolist(), strict=True))
        is_labels = trained.run.train.targets == "labels"
        if is_labels:
            named = dict(sorted(named.items(), key=lambda item: -item[1]))
        if options.json:
            print(json.dumps({"image": str(path), "probabilities" if is_labels else "values": named}))
        else:
            print(f"{path}: {'  '.join(_write_value(*item, is_labels) for item in named.items())}")
        return
    top = _top(trained, found)
    if options.json:
        print(json.dumps({"image": str(path), "top": top}))
    else:
        best = "  ".join(f"{row['class']} {100 * row['probability']:.1f} %" for row in top)
        print(f"{path}: {best}")


def _write_value(name: str, value: float, is_label: bool) -> str:
    return f"{name} {100 * value:.1f} %" if is_label else f"{name} {value:.6g}"


def _top(trained: Trained, probabilities: Tensor) -> list[dict[str, Any]]:
    values, indices = probabilities.topk(min(_TOP, len(trained.classes)))
    return [
        {"class": trained.classes[index], "index": index, "probability": value}
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]
