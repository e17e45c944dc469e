"""`lockstep eval`: evaluates a trained run on images it was not trained on."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.flag import (
    add_device,
    add_eval_workers,
    add_json,
    add_trained_run,
    check_new_file,
    eval_launch,
)
from lockstep.cli.launch import start_users
from lockstep.cli.trained_run import joined_run, open_part, open_run
from lockstep.errors import BadInput, DataError

if TYPE_CHECKING:
    from lockstep.data import Split
    from lockstep.runs.trained_run import Trained
    from lockstep.train.evaluation.confusion import Confusion, Mistake
    from lockstep.train.evaluation.host_evaluate import Evaluation

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TOP = 5
_PAIRS, _WITH_IMAGES, _EXAMPLES = 30, 10, 6  # pairs of classes; how many have images; how many each
_SHOWN, _SIDE = 48, 128  # the most confident wrong predictions, and pixels a side of an image


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    text = "evaluate a trained run on its test images, or on others"
    parser = verbs.add_parser("eval", help=text, description=f"{text.capitalize()}.")
    add_trained_run(parser)
    add_device(parser)
    parser.add_argument(
        "--split", choices=("val", "test"), help="default: test, or val where there is no test"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--data-dir", metavar="DIR", help="where the run's own data lies, if it moved")
    where.add_argument(
        "--other-data",
        metavar="DIR",
        help="evaluate on other images: DIR, or its val/ and test/, has a folder for each class of the run",
    )
    parser.add_argument(
        "--by-class",
        action="store_true",
        help="also top-5 accuracy, and of each class its accuracy and what it is most often taken for",
    )
    parser.add_argument(
        "--confusion", type=Path, metavar="FILE.png", help="also draw which classes are taken for which"
    )
    parser.add_argument(
        "--wrong",
        type=Path,
        metavar="FILE.html",
        help="also write a page of the wrong predictions: the most confused pairs of classes, and images, "
        "most confident first",
    )
    add_json(parser)
    add_eval_workers(parser)
    parser.set_defaults(handler=evaluate)


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate, alone or as one of several workers, and print loss and accuracy."""
    for path, flag, suffix in (options.confusion, "--confusion", ".png"), (options.wrong, "--wrong", ".html"):
        if path:
            check_new_file(path, flag, suffix)
    launch, counts = start_users(eval_launch(options)), options.by_class or options.confusion or options.wrong
    if launch.world and counts:
        raise BadInput(
            "--by-class, --confusion and --wrong are for one process: leave --workers and --plan out"
        )
    opens = _open_other if options.other_data else _open_own
    if launch.world:
        with joined_run(launch, partial(open_part, options)) as joined:
            name, split = joined.agree(lambda: opens(joined.trained, options))
            result = joined.evaluate(split)
            if joined.is_main:
                _tell(joined.trained, name, result, options)
        return 0
    from lockstep.train.evaluation.evaluate import evaluate_trained

    trained = open_run(options, options.device)
    name, split = opens(trained, options)
    result = evaluate_trained(trained, split)
    if not counts:
        _tell(trained, name, result, options)
        return 0
    from lockstep.train.evaluation.confusion import count_confusions

    found = count_confusions(trained, split)
    rows = found.rows(trained.classes)
    pairs = [
        {"class": trained.classes[label], "taken_for": trained.classes[predicted], "samples": count}
        for label, predicted, count in found.pairs()[:_PAIRS]
    ]
    more = {"top5_accuracy": found.in_top5 / found.samples, "classes": rows, "confused": pairs}
    _tell(trained, name, result, options, more)
    if options.confusion:
        from lockstep.report.confusion_picture import draw_confusion

        title = f"{trained.directory.name}, {name}: {found.samples:,} images"
        draw_confusion(found.counts.numpy(), trained.classes, title, options.confusion)
    if options.wrong:
        _write_page(trained, name, split, found, options.wrong)
    sys.stderr.writelines(f"wrote {path}\n" for path in (options.confusion, options.wrong) if path)
    return 0


def _tell(
    trained: Trained,
    name: str,
    result: Evaluation,
    options: argparse.Namespace,
    more: dict[str, Any] | None = None,
) -> None:
    row = {
        "run": str(trained.directory),
        "step": trained.step,
        "split": name,
        "other_data": bool(options.other_data),
        "loss": result.loss,
        "accuracy": result.accuracy,
        "correct": result.correct,
        "samples": result.samples,
        "metrics": result.metrics,
    }
    if options.json:
        print(json.dumps({**row, **(more or {})}))
    else:
        where = f"on other data, {name}" if options.other_data else name
        parts = [f"loss {result.loss:.4f}", *(f"{key} {value:.4g}" for key, value in result.metrics.items())]
        if result.accuracy is None:
            counted = f"{where}, {result.samples:,} images: "
        else:
            what = f"accuracy {where}:" if options.other_data else f"{name} accuracy"
            counted = f"{what} {100 * result.accuracy:.2f} % ({result.correct:,} of {result.samples:,}), "
        print(f"{trained.directory} step {trained.step}: {counted}{', '.join(parts)}")
        if options.by_class or options.confusion:
            _print_classes(more or {})
        if options.wrong and more:
            for row in more["confused"][:_TOP]:
                print(f"  {row['class']} taken for {row['taken_for']}: {row['samples']:,}")


def _print_classes(more: dict[str, Any]) -> None:
    """The top-5 accuracy, if there are more classes, and a line for each class, the worst first."""
    if len(more["classes"]) > _TOP:
        print(f"top-5 accuracy {100 * more['top5_accuracy']:.2f} %")
    width = max(len(row["class"]) for row in more["classes"])
    for row in sorted(more["classes"], key=lambda row: 1.0 if row["accuracy"] is None else row["accuracy"]):
        share = "     –" if row["accuracy"] is None else f"{100 * row['accuracy']:5.1f} %"
        mistaken = f", most often taken for {row['mistaken_for']}" if row["mistaken_for"] else ""
        print(f"  {row['class']:{width}}  {share} of {row['samples']:,}{mistaken}")


def _write_page(trained: Trained, name: str, split: Split, found: Confusion, path: Path) -> None:
    """The page of wrong predictions, with a bounded number of images."""
    import torch

    from lockstep.data.images.thumbnail import thumbnail
    from lockstep.report.page.mistake_page import ShownMistake, ShownPair, make_mistake_page

    classes = trained.classes

    @cache
    def show(mistake: Mistake) -> ShownMistake:
        images, _ = split.read(torch.tensor([mistake.sample]))
        names = classes[mistake.label], classes[mistake.predicted]
        file = _name_sample(split, mistake.sample)
        return ShownMistake(thumbnail(images[0], _SIDE), file, *names, mistake.confidence, mistake.of_label)

    pairs = []
    for place, (label, predicted, count) in enumerate(found.pairs()[:_PAIRS]):
        of_pair = [each for each in found.mistakes if (each.label, each.predicted) == (label, predicted)]
        examples = [show(each) for each in of_pair[: _EXAMPLES if place < _WITH_IMAGES else 0]]
        samples = int(found.counts[label].sum())
        pairs.append(ShownPair(classes[label], classes[predicted], count, samples, examples))
    wrong, samples = len(found.mistakes), found.samples
    about = (
        f"{wrong:,} of {samples:,} images of {name} are wrong, accuracy {100 * (1 - wrong / samples):.2f} %, "
        f"at step {trained.step}. Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    )
    page = make_mistake_page(
        f"{trained.directory.name}: wrong predictions",
        about,
        pairs,
        [show(each) for each in found.mistakes[:_SHOWN]],
        found.rows(classes),
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(page)


def _name_sample(split: Split, sample: int) -> str:
    """The class folder and the file of an image; its number if it has no file."""
    from lockstep.data.images.encoded_split import EncodedSplit

    if not isinstance(split, EncodedSplit):
        return f"image {sample}"
    return "/".join(Path(split.source.where(sample)).parts[-2:])


def _open_own(trained: Trained, options: argparse.Namespace) -> tuple[str, Split]:
    """A test or validation split of the run's own data, and its name."""
    from lockstep.data import open_data
    from lockstep.runs.trained_run import check_same_data

    run = trained.run
    if options.data_dir:
        run = replace(run, data=replace(run.data, dir=options.data_dir))
    store = open_data(run)
    if warning := check_same_data(trained, store):
        print(f"warning: {warning}", file=sys.stderr)
    name, splits = options.split or store.test_name, store.eval_splits()
    if name not in splits:
        raise DataError(
            f"--split {name}: {store.name} has no such images here: use --split {next(iter(splits))}"
        )
    return name, splits[name]


def _open_other(trained: Trained, options: argparse.Namespace) -> tuple[str, Split]:
    """The images that --other-data gives instead of the run's own, and their folder."""
    from lockstep.data.images.folder import open_images

    if trained.takes_floats:
        raise DataError(
            f"--other-data: {trained.directory} was trained on images of floats, which no image file gives: "
            "use lockstep.predictor in Python"
        )
    if trained.has_values:
        raise DataError(
            "--other-data takes a folder of classes, and this run has rows of values: use --data-dir"
        )
    folder, form = Path(options.other_data), (trained.classes, trained.shape)
    place, split = open_images(folder, *form, options.split, trained.crop_pct)
    return str(place), split
