"""`lockstep doctor`: prints versions, devices, kernels, data and the numerics fingerprint of this machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.cli.doctor_comm import COLUMNS, examine_comm
from lockstep.cli.flag import add_json
from lockstep.data.catalog import data_names

if TYPE_CHECKING:
    import torch

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_PACKAGES = ("torch", "numpy", "safetensors", "rich", "pillow", "matplotlib")
_EXTRAS = {
    "timm": ("timm",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "mpi": ("mpi4py",),
    "images": ("simplejpeg", "cv2"),
    "parquet": ("pyarrow",),
    "fused": ("triton",),
    "lightning": ("lightning",),
    "report": ("plotly",),
    "peers": ("tensorflow", "jax"),
}


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    text = "versions, devices, backends, data found, fingerprint"
    parser = verbs.add_parser("doctor", help=text, description=text.capitalize() + ".")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where data sets lie; default: data")
    parser.add_argument(
        "--comm",
        nargs="?",
        const="all",
        choices=("all", *COLUMNS),
        metavar="BACKEND-DEVICE",
        help="instead, try every operation between workers on every backend and device, or on one: "
        + ", ".join(COLUMNS),
    )
    add_json(parser)
    parser.set_defaults(handler=examine)


def examine(options: argparse.Namespace) -> int:
    """Print the facts as a table or as JSON."""
    if options.comm:
        return examine_comm(options.comm, options.json)
    facts = gather_facts(options.data_dir)
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    for section, rows in facts.items():
        print(section)
        for key, value in rows.items():
            print(f"  {key:14} {value}")
    return 0


def gather_facts(data_dir: Path | None) -> dict[str, dict[str, Any]]:
    """All facts that the doctor prints, by section."""
    import torch

    from lockstep.kernels.numerics import prepare_device
    from lockstep.measure.machine_fingerprint import fingerprint

    default_threads = torch.get_num_threads()
    device = prepare_device("auto", threads=1)
    return {
        "versions": {
            "lockstep": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "extras": {name: _extra(modules) for name, modules in _EXTRAS.items()},
        "devices": {
            "cpu": f"{len(os.sched_getaffinity(0))} cores usable, {torch.backends.cpu.get_cpu_capability()}",
            **{f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())},
            "C compiler": _compiler(),
        },
        "threads": {"a worker": "1 (train.threads)", "torch default": default_threads},
        "backends": {
            name: "yes" if getattr(torch.distributed, f"is_{name}_available", lambda: False)() else "no"
            for name in ("gloo", "nccl")
        },
        "kernels": _kernels(device),
        "data": {name: _data(name, data_dir) for name in data_names(fetchable=True)},
        f"fingerprint on {device.type}": fingerprint(device),
    }


def _kernels(device: torch.device) -> dict[str, str]:
    """Which kernels `kernels.set=auto` chooses for each model with default options on 64x64 RGB images."""
    import torch

    from lockstep.models import build, model_names

    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        missing = "a GPU" if device.type != "cuda" else "the package triton"
        return {"all models": f"stock: fused and compiled ones need {missing}"}
    from lockstep.kernels.triton.conv.tile_table import find_table, moves_boxes
    from lockstep.lower.fused.chain_program import find_chain
    from lockstep.lower.fused.residual_program import find_residual

    num_tiles, found = len(find_table(device).entries), {}
    for name in model_names():
        with torch.device("meta"):
            model = build(name, in_channels=3, num_classes=10, image_size=(64, 64))
        found[name] = "compiled (`lockstep bench lanes` shows how its lanes run)"
        if find_chain(model, (3, 64, 64)):
            found[name] = "fused in bf16, fp16 and tf32, compiled in fp32"
        elif find_residual(model, (3, 64, 64)) and moves_boxes(device):
            found[name] = "fused in bf16 and fp16, else compiled"
    return {**found, "tiles": f"{num_tiles} measured on this device, others by rule"}


def _compiler() -> str:
    from lockstep.errors import LockstepError
    from lockstep.native.c_library import find_compiler

    try:
        return find_compiler()
    except LockstepError as error:
        return f"{error}; without one updates and compression take longer on a CPU"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _extra(modules: tuple[str, ...]) -> str:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"missing {', '.join(missing)}" if missing else "installed"


def _data(name: str, directory: Path | None) -> str:
    from lockstep.data.catalog import find_files, open_store
    from lockstep.errors import DataError

    found, usual = find_files(name, directory), (directory or Path("data")) / name
    if found is None:
        return f"not in {directory or usual} (lockstep data get {name} --dir {usual})"
    try:
        store = open_store(name, found, {})
    except DataError as error:
        return str(error)
    return f"{found}: {len(store.train):,} + {len(store.test):,} images"
