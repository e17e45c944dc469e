"""Opens a trained run for use: rebuilds its model and loads the weights of a checkpoint, or leaves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Store
from lockstep.data.augment import Augment, make_augment
from lockstep.errors import BadInput, CheckpointError, DataError, ModelError
from lockstep.kernels.numerics import memory_format, plain_torch, prepare_device, to_device
from lockstep.kernels.structure import as_float
from lockstep.models.registry import build_model
from lockstep.models.tensors import copy_part, model_tensors
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint import Saved
from lockstep.runs.directory import RunDirectory
from lockstep.runs.resume import check_checkpoint, newest_checkpoint
from lockstep.spec import Run
from lockstep.spec.identity import HISTORY, Identity, differences, flatten

_DECODER = "manifest.decoder"


class Weights(Mapping[str, Tensor]):
    """The weights to use, each read when it is asked for: averaged ones, if the checkpoint has them."""

    def __init__(self, saved: Saved) -> None:
        self._file = saved.tensors
        self._keys = {k.removeprefix("model."): k for k in self._file if k.startswith("model.")}
        self._keys |= {k.removeprefix("ema."): k for k in self._file if k.startswith("ema.")}

    def __getitem__(self, name: str) -> Tensor:
        return self._file[self._keys[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return self._file.shape(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True)
class Trained:
    """A trained model in eval mode; it may be on `meta` still, without the weights."""

    directory: Path
    run: Run
    model: nn.Module
    weights: Weights
    step: int
    identity: Identity
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # C H W of images to evaluate and to predict
    augment: Augment
    device: torch.device
    crop_pct: float = 1.0  # the share of the box: see `fit_image`

    @property
    def memory_format(self) -> torch.memory_format:
        return memory_format(self.run)

    @property
    def is_classifier(self) -> bool:
        """Whether the model gives one logit for each class."""
        return not {"source.outputs", "manifest.values"} & self.identity.keys()

    @property
    def has_values(self) -> bool:
        """Whether the model gives one output for each of several labels or numbers, which `classes` name."""
        return "source.outputs" not in self.identity and "manifest.values" in self.identity

    def answer(self, outputs: Any) -> Any:
        """What to predict from a model's outputs: probabilities of classes or of labels, or what it gives."""
        if self.is_classifier:
            return outputs.float().softmax(1)
        if self.has_values and self.run.train.targets == "labels":
            return outputs.float().sigmoid()
        return as_float(outputs)

    @property
    def has_own_data(self) -> bool:
        """Whether it was trained on a user's own data set, which cannot be opened by name."""
        return "manifest.sample_sha256" in self.identity

    @property
    def takes_floats(self) -> bool:
        """Whether it was trained on float images of a user's own data set, which are not normalized."""
        return self.has_own_data and set(self.augment.mean) == {0.0} and set(self.augment.std) == {1.0}


def open_trained(
    runs_dir: Path,
    name: str,
    *,
    device: str,
    which: str = "last",
    model: nn.Module | None = None,
    loads: bool = True,
    local_rank: int | None = None,
) -> Trained:
    """Open a run by name or directory; `which` is `last`, `best` or a checkpoint's path.

    Without `loads` no weight is read, and the model has no memory: all of it is on `meta`.
    """
    with plain_torch():
        trained = _open(RunDirectory.find(runs_dir, name), device, which, model, loads, local_rank)
        if loads:
            _copy_weights(trained)
        return trained


def _open(
    directory: RunDirectory,
    device: str,
    which: str,
    model: nn.Module | None,
    loads: bool,
    local_rank: int | None,
) -> Trained:
    run, identity = directory.run(), directory.identity()
    saved = _choose(directory, which)
    check_checkpoint(saved, identity)
    if "manifest.classes" not in identity:
        raise BadInput(f"{directory.path / 'identity.json'}: names no classes: the run is incomplete")
    classes, shape = tuple(identity["manifest.classes"]), tuple(identity["manifest.shape"])
    if model is None:
        if "source.model.class" in identity:
            raise ModelError(
                f"{directory.path} trained a module of your own "
                f"({identity['source.model.class'].split()[0]}): give it to "
                "lockstep.load, predictor, evaluate or export in Python as model=YourModule()"
            )
        model = build_model(run, (shape[0], shape[1], shape[2]), len(classes), without_memory=not loads)
    elif not loads:
        model = copy_part(model, lambda name: False)  # the caller's own stays as it is
    weights, size = Weights(saved), identity.get("manifest.eval_size", 0)
    _check_weights(model, weights, saved.path)
    chosen = prepare_device(device, run.train.threads, local_rank, tf32=run.train.precision == "tf32")
    place = chosen if loads else torch.device("meta")
    augment = make_augment(run, shape, tuple(identity["manifest.mean"]), tuple(identity["manifest.std"]))
    return Trained(
        directory.path,
        run,
        to_device(model, place, run).eval(),
        weights,
        int(saved.manifest["cursor"]["step"]),
        identity,
        classes,
        (shape[0], size, size) if size else shape,
        augment,
        chosen,
        identity.get("manifest.crop_pct", 1.0),
    )


def check_same_data(trained: Trained, store: Store) -> str:
    """Refuse other data than the run was trained and tested on; a warning if other libraries decode it."""
    if trained.has_own_data:
        raise DataError(
            f"{trained.directory} was trained on data of your own: hand it to lockstep.evaluate in Python as "
            "data=YourData()"
        )
    theirs = {k: v for k, v in trained.identity.items() if k.startswith("manifest.") and k != HISTORY}
    ours = flatten("manifest", store.facts())
    decoders = [facts.pop(_DECODER, None) for facts in (theirs, ours)]
    if found := differences(theirs, ours):
        raise DataError(
            f"{trained.directory} was trained on other data than {store.name} as it is here: {found[0]}; "
            "give its --data-dir, or --other-data DIR to evaluate on other images"
        )
    if decoders[0] == decoders[1]:
        return ""
    return (
        "these images were decoded by other libraries in training, so pixels and the result may differ "
        f"a little: {decoders[0]} there, {decoders[1]} here"
    )


def _choose(directory: RunDirectory, which: str) -> Saved:
    paths = checkpoint.checkpoint_steps(directory.checkpoints)
    if which == "last" and paths:
        try:
            return checkpoint.load_checkpoint(paths[max(paths)])
        except CheckpointError as error:  # training falls back to an older one; here the user must ask
            raise CheckpointError(f"{error}: give an older one by --checkpoint PATH") from None
    newest = newest_checkpoint(directory)
    if which == "best":
        step = int(newest.manifest["cursor"]["best_step"])
        if step not in paths:
            raise CheckpointError(f"{directory.path}: no best checkpoint yet: no epoch was evaluated")
        return checkpoint.load_checkpoint(paths[step])
    if not Path(which).is_file():
        raise BadInput(f"--checkpoint {which}: must be last, best or the path of a checkpoint")
    return checkpoint.load_checkpoint(Path(which))


def _check_weights(model: nn.Module, weights: Weights, path: Path) -> None:
    theirs = {name: weights.shape(name) for name in weights}
    every = {**model.state_dict(), **dict(model.named_buffers())}
    ours = {name: tuple(tensor.shape) for name, tensor in every.items()}
    if theirs != ours:
        first = sorted(dict(theirs.items() ^ ours.items()))[0]
        raise ModelError(
            f"{path}: its weights do not fit the model: '{first}' is {theirs.get(first, 'absent')} "
            f"there and {ours.get(first, 'absent')} here"
        )


@torch.no_grad()
def _copy_weights(trained: Trained) -> None:
    for name, target in model_tensors(trained.model).items():
        target.copy_(trained.weights[name])
