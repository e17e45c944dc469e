"""`lockstep eval`: a trained run on its test images."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_device, add_json, add_trained_run
from lockstep.cli.trained_run import open_run

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    text = "evaluate a trained run on its test images"
    parser = verbs.add_parser("eval", help=text, description=text.capitalize() + ".")
    add_trained_run(parser)
    add_device(parser)
    parser.add_argument("--data-dir", metavar="DIR", help="where the data lies, if it moved")
    add_json(parser)
    parser.set_defaults(handler=evaluate)


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate and print loss and accuracy."""
    from lockstep.data import open_data
    from lockstep.runs.trained_run import check_same_data
    from lockstep.train.evaluate_run import evaluate_trained

    trained = open_run(options, options.device)
    run = trained.run
    if options.data_dir:
        run = replace(run, data=replace(run.data, dir=options.data_dir))
    store = open_data(run)
    check_same_data(trained, store)
    result = evaluate_trained(trained, store)
    row = {
        "run": str(trained.directory),
        "step": trained.step,
        "loss": result.loss,
        "accuracy": result.accuracy,
        "correct": result.correct,
        "samples": result.samples,
    }
    if options.json:
        print(json.dumps(row))
    else:
        print(
            f"{trained.directory} step {trained.step}: accuracy {100 * result.accuracy:.2f} % "
            f"({result.correct:,} of {result.samples:,}), loss {result.loss:.4f}"
        )
    return 0
