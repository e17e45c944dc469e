"""Lockstep trains convolutional networks to the same bits, by any number of workers, killed and resumed.

    import lockstep
    result = lockstep.train(lockstep.recipe("shapes"))
    print(result.summary["accuracy"], result.summary["weights_sha256"])

Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.data.pack.find_source import pack_data as pack
from lockstep.errors import LockstepError, SpecError
from lockstep.recipes import recipe
from lockstep.spec import Data, Launch, Model, Optimizer, Run, Schedule, Train
from lockstep.spec.system import check_system

if TYPE_CHECKING:
    from torch import nn

    from lockstep.data.changes.own_change import OwnFunction
    from lockstep.kernels.loss import Loss
    from lockstep.runs.event import Listener
    from lockstep.runs.predictor import Predictor
    from lockstep.train.evaluation.host_evaluate import Evaluation
    from lockstep.train.evaluation.metric import Metrics
    from lockstep.train.result import Result

__all__ = [
    "Data",
    "Launch",
    "LockstepError",
    "Model",
    "Optimizer",
    "Run",
    "Schedule",
    "Train",
    "evaluate",
    "export",
    "is_main",
    "load",
    "pack",
    "predictor",
    "recipe",
    "train",
]
__version__ = "0.1.0"


def train(  # noqa: PLR0913  (what a script may give)
    run: Run,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    on_event: Listener | None = None,
    launch: Launch | None = None,
    *,
    metrics: Metrics | None = None,
    augment: OwnFunction | None = None,
) -> Result:
    """Train a Run; `model` (any nn.Module), `data` (any map-style set, or a pair) and `loss` replace its own.

    With a loss of yours, outputs and targets may have any shape: masks, several labels, numbers, dicts.
    `metrics` are functions of outputs and targets by name, computed in every evaluation: each gives the mean
    over the samples it got, or a pair (numerators, denominators) to be summed over all of them first.
    `augment` is a function of (image, generator) that gives an image like it: uint8 [H, W, C] in NumPy, and a
    NumPy generator keyed by seed, epoch and sample. It changes training images, on the host.

    A progress bar is drawn unless `on_event` is given, which then gets every event instead. With several
    workers (`launch=Launch(workers=4)`, torchrun, mpirun) each one runs the whole script, and worker 0 tells.
    """
    check_system()
    from lockstep.cli.flag import check_trackers
    from lockstep.cli.launch import start_workers

    launch = launch or Launch()
    check_trackers(launch)
    if launch.data_processes and data is None:
        raise SpecError(
            f"data_processes={launch.data_processes} are for a data set in Python, and data.name="
            f"{run.data.name} is read by threads: set decode_threads instead"
        )
    launch = start_workers(launch, run)
    from lockstep.cli.listeners import train_with_listeners
    from lockstep.train.setup import Given

    return train_with_listeners(run, launch, on_event, Given(model, data, loss, metrics or {}, augment))


def is_main() -> bool:
    """Whether this process is the one to do what a script does once: print, fetch or write a file.

    True in a script alone. With several workers, one process says True before `lockstep.train` and one after
    it: worker 0, whoever that has become. With Launch(rdzv=…) it is one a node before training.
    """
    from lockstep.cli.launch import find_main

    return find_main()


def load(run: str | Path, model: nn.Module | None = None, *, checkpoint: str = "last") -> nn.Module:
    """The trained model of a run, ready for inference; a run of your own module needs that `model`.

    Here and below, `checkpoint` is `last`, `best` or the path of one.
    """
    from lockstep.runs.trained_run import open_trained

    return open_trained(Path("runs"), str(run), device="cpu", which=checkpoint, model=model).model


def evaluate(
    run: str | Path,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    *,
    metrics: Metrics | None = None,
    checkpoint: str = "last",
    device: str | Launch = "auto",
) -> Evaluation:
    """Loss, accuracy and metrics of a run on its test images; what is given here is as for `train`.

    What the run took from a script has to be given again; a loss that is left out is the one that the Run
    names. Of `data` the test part counts, whatever the run was trained on. `device` may be a Launch of
    several workers, which then all evaluate together: `Launch(plan="pipeline=2")`.
    """
    from lockstep.cli.launch import start_users

    launch = start_users(device) if isinstance(device, Launch) else Launch(device=device)
    opened: dict[str, Any] = {"name": str(run), "which": checkpoint, "model": model}
    if launch.world:
        from lockstep.cli.trained_run import evaluate_joined

        return evaluate_joined(launch, opened, data, loss, metrics)
    from lockstep.runs.trained_run import open_trained
    from lockstep.train.evaluation.evaluate import evaluate_trained, open_given_data

    trained = open_trained(launch.runs_dir, device=launch.device, **opened)
    return evaluate_trained(trained, open_given_data(trained, data).test, loss, metrics)


def export(
    run: str | Path, path: str | Path, model: nn.Module | None = None, *, checkpoint: str = "last"
) -> Path:
    """Write the trained model of a run to a new file, `….onnx` or `….safetensors`; gives its path."""
    from lockstep.runs.export import export_model
    from lockstep.runs.trained_run import open_trained

    kind = Path(path).suffix.removeprefix(".")
    trained = open_trained(
        Path("runs"), str(run), device="cpu", which=checkpoint, model=model, loads=kind == "onnx"
    )
    export_model(trained, Path(path), kind)
    return Path(path)


def predictor(
    run: str | Path, *, device: str = "auto", model: nn.Module | None = None, checkpoint: str = "last"
) -> Predictor:
    """The trained model of a run as a function: uint8 images [N, C, H, W] → probabilities [N, classes].

    Its `classes` are their names. On a GPU, for a run that its kernels take, each batch size is one CUDA
    graph. A run of your own module needs that `model`.
    """
    from lockstep.runs.predictor import Predictor
    from lockstep.runs.trained_run import open_trained

    return Predictor(open_trained(Path("runs"), str(run), device=device, which=checkpoint, model=model))


class _Package(ModuleType):
    """Keeps `lockstep.train` the function; importing the package of that name would rebind it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "train" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
