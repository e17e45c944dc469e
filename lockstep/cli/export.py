"""`lockstep export`: a trained model as one file for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_trained_run
from lockstep.cli.run import open_run
from lockstep.errors import BadInput

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_SUFFIX = {"safetensors": ".safetensors", "onnx": ".onnx"}


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    text = "write a trained model as safetensors or ONNX"
    parser = verbs.add_parser("export", help=text, description=text.capitalize() + ".")
    add_trained_run(parser)
    parser.add_argument("--format", choices=sorted(_SUFFIX), required=True, help="the file's format")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/model.SUFFIX")
    parser.set_defaults(handler=export)


def export(options: argparse.Namespace) -> int:
    """Write the file; one that exists is never overwritten."""
    from lockstep.runs.export import export_onnx, export_safetensors

    trained = open_run(options, "cpu")
    path = options.output or trained.directory / f"model{_SUFFIX[options.format]}"
    if path.exists():
        raise BadInput(f"{path} exists and is not overwritten: give another --output or remove it")
    if not path.parent.is_dir():
        raise BadInput(f"--output {path}: the folder {path.parent} does not exist")
    if options.format == "onnx":
        error = export_onnx(trained, path)
        print(f"{path}: {path.stat().st_size:,} bytes, within {error:.1e} of torch in onnxruntime")
    else:
        export_safetensors(trained, path)
        print(f"{path}: {path.stat().st_size:,} bytes, step {trained.step}")
    if trained.takes_floats:
        return 0
    mean, std = (
        ", ".join(f"{v:g}" for v in values) for values in (trained.augment.mean, trained.augment.std)
    )
    print(f"its input: (pixel / 255 − mean) / std by channel, mean {mean}, std {std}")
    return 0
