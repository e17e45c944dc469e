"""`lockstep export`: the flags of the verb; `runs/export.py` writes the file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_trained_run
from lockstep.cli.trained_run import open_run

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_FORMATS = ("onnx", "safetensors")


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    text = "write a trained model as safetensors or ONNX"
    more = " Safetensors are copied one tensor at a time, so a model of any size is exported without a plan."
    parser = verbs.add_parser("export", help=text, description=f"{text[0].upper()}{text[1:]}.{more}")
    add_trained_run(parser)
    parser.add_argument("--format", choices=_FORMATS, required=True, help="the file's format")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/model.SUFFIX")
    parser.set_defaults(handler=export)


def export(options: argparse.Namespace) -> int:
    """Write the file; an existing file is never overwritten."""
    from lockstep.runs.export import SUFFIXES, export_model

    trained = open_run(options, "cpu", loads=options.format == "onnx")
    path = options.output or trained.directory / f"model{SUFFIXES[options.format]}"
    error = export_model(trained, path, options.format)
    more = f"step {trained.step}" if error is None else f"within {error:.1e} of torch in onnxruntime"
    print(f"{path}: {path.stat().st_size:,} bytes, {more}")
    if trained.takes_floats:
        return 0
    mean, std = (
        ", ".join(f"{v:g}" for v in values) for values in (trained.augment.mean, trained.augment.std)
    )
    print(f"its input: (pixel / 255 − mean) / std by channel, mean {mean}, std {std}")
    return 0
