"""Command-line flags that several verbs share."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from lockstep.errors import BadInput
from lockstep.spec.launch import BACKENDS, DEVICES, TRACKERS, Launch
from lockstep.spec.plan import read_plan
from lockstep.spec.system import extra_command


def add_run_keys(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make a Run: a recipe, then a file's keys, then overrides."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="where to start from; default: shapes")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE.toml", help="keys of a Run")
    parser.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one key, e.g. -o optimizer.lr=0.1",
    )


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Add the folder that holds the runs."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the device to compute on."""
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="default: auto, a GPU if there is one"
    )


def add_trackers(parser: argparse.ArgumentParser) -> None:
    """Add who else gets a run's measurements."""
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        choices=TRACKERS,
        help="also show the run there, by the extra of that name; may be given several times",
    )


def check_trackers(launch: Launch) -> None:
    """Raise an error if a tracker's package is not installed, before any work starts."""
    for name in launch.track:
        found = find_spec(name)
        if not found or not found.origin:  # a mere folder of that name, such as W&B makes, is no package
            raise BadInput(f"--track {name} needs the extra: {extra_command(name)}")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the number of workers, and how they exchange gradients; nothing here changes a bit."""
    group = add_num_workers(parser, "train.lanes")
    _add_plan(
        group,
        "how the model is dealt to workers: pipeline=2 gives each half of them half of the layers, "
        "spatial=2 half of an image's rows, channel=2 half of a layer's channels, data=2,pipeline=2 needs 4 "
        "workers (workers = data × pipeline × spatial × channel), shard=optimizer, gradients or parameters "
        "shares these over data, layers=PATTERN/PATTERN the channels of fully connected layers; also "
        "replicas=2 (of shares), schedule=gpipe, cost=counted, cuts=LAYER/LAYER; or a TOML file with such "
        "keys",
    )
    group.add_argument(
        "--or",
        dest="fallbacks",
        action="append",
        default=[],
        metavar="SPEC|FILE",
        help="a plan for when workers are lost; may be given several times: the first that the workers that "
        "are left come out for",
    )
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="how many workers keep each share of a plan with shard, so that N - 1 may be lost (default 1)",
    )
    _add_backend(group)
    group.add_argument(
        "--bucket-mb",
        type=float,
        default=25.0,
        metavar="MB",
        help="size of the buckets in which gradients are sent; default: 25",
    )
    group.add_argument("--no-overlap", action="store_true", help="exchange gradients after the backward pass")
    group.add_argument(
        "--no-graph", action="store_true", help="launch kernels one by one on a GPU, not as CUDA graphs"
    )


def add_feeding(parser: argparse.ArgumentParser) -> None:
    """Add how images are read; nothing here changes a bit."""
    group = parser.add_argument_group("reading images")
    group.add_argument(
        "--decode-threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of a worker that decode images; default: the machine's cores, shared by its workers",
    )
    group.add_argument(
        "--read-ahead",
        type=int,
        default=2,
        metavar="STEPS",
        help="how many steps' images are read before they are needed; default: 2",
    )
    group.add_argument(
        "--pixel-cache",
        type=Path,
        metavar="DIR",
        help="keep decoded, resized images in this folder of a local disk, for later epochs and runs",
    )
    group.add_argument(
        "--pixel-cache-gb", type=float, default=10.0, metavar="GB", help="the most it may take; default: 10"
    )


def add_eval_workers(parser: argparse.ArgumentParser) -> None:
    """Add the number of workers that use a trained run, and what each has of its model."""
    group = add_num_workers(parser, "one for each block of images")
    _add_plan(
        group,
        "for a model that does not fit one worker: pipeline=2 gives each half of the workers half of the "
        "layers, shard=parameters each a share of the weights; the result is the same",
    )
    _add_backend(group)


def eval_launch(options: argparse.Namespace) -> Launch:
    """How the workers of `add_eval_workers` are started."""
    plan = read_plan(options.plan)
    return Launch(device=options.device, workers=options.workers, backend=options.backend, plan=plan)


def _add_plan(group: argparse._ArgumentGroup, text: str) -> None:
    group.add_argument("--plan", default="pipeline=1", metavar="SPEC|FILE", help=text)


def _add_backend(group: argparse._ArgumentGroup) -> None:
    text = "default: auto, nccl with a GPU per worker, else gloo"
    group.add_argument("--backend", choices=BACKENDS, default="auto", help=text)


def add_num_workers(parser: argparse.ArgumentParser, most: str) -> argparse._ArgumentGroup:
    """Add the number of workers, which may be up to `most`; gives the group of flags it is in."""
    group = parser.add_argument_group("workers")
    group.add_argument(
        "--workers",
        type=_workers,
        metavar="N|auto",
        help=f"processes on this machine, up to {most}; default: 1; auto: one per GPU, else one per core",
    )
    return group


def add_elastic(parser: argparse.ArgumentParser) -> None:
    """Add the flags for lost workers and for jobs on several nodes; nothing here changes a bit."""
    group = parser.add_argument_group("losses and nodes (with --workers)")
    group.add_argument(
        "--min-workers",
        type=int,
        default=1,
        metavar="N",
        help="with fewer, training waits for more; default: 1",
    )
    group.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long it waits, then it saves and stops with exit code 143; default: 60",
    )
    group.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="how many lost workers this launcher replaces an hour; it waits longer each time if they die "
        "soon after their start; default: 3",
    )
    group.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="where launchers of several nodes meet: the one on HOST is the coordinator; all need the same "
        "LOCKSTEP_TOKEN in the environment",
    )
    group.add_argument(
        "--nodes", default="1", metavar="N|MIN:MAX", help="how many launchers make the job; default: 1"
    )
    group.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt what launchers say to each other, and let none in without a certificate: a folder with "
        "ca.crt, tls.crt and tls.key; gradients between workers are not encrypted",
    )


def _workers(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def add_trained_run(parser: argparse.ArgumentParser) -> None:
    """Add a trained run, and which of its checkpoints to use."""
    parser.add_argument("run", metavar="RUN", help="a run's name or directory")
    parser.add_argument(
        "--checkpoint", default="last", metavar="last|best|PATH", help="which weights; default: last"
    )
    add_runs_dir(parser)


def check_new_file(path: Path, flag: str, suffix: str = ".png") -> None:
    """Refuse a file to write that is there already, whose folder is not, or that has another suffix."""
    if path.suffix.lower() != suffix:
        what = "pictures are PNG files" if suffix == ".png" else f"what is written is a {suffix} file"
        raise BadInput(f"{flag} {path}: {what}: name it {path.stem}{suffix}")
    if path.exists():
        raise BadInput(f"{flag} {path}: there is such a file: remove it, or name another")
    if not path.parent.is_dir():
        raise BadInput(f"{flag} {path}: there is no folder {path.parent}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag for output that programs read."""
    parser.add_argument("--json", action="store_true", help="print JSON")
