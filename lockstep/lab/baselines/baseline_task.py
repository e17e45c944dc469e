"""What all contestants are given, files of one folder: numbers, weights, images, order of samples."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray[Any, Any]
LAYERS = ("block1.0", "block2.0", "block3.0", "hidden.1", "classifier")
PARAMETERS = tuple(f"blocks.{layer}.{part}" for layer in LAYERS for part in ("weight", "bias"))
CLASSES, SIDE = 7, 48


@dataclass(frozen=True)
class BaselineTask:
    """Train emotion48 by plain SGD; nothing here differs between contestants but the number of cores."""

    folder: str
    images: int
    tests: int
    batch: int
    epochs: int
    rate: float
    seed: int
    device: str  # cpu or cuda
    precision: str  # fp32, tf32 or bf16, for those that can choose
    cores: int
    processes: int  # of MPI
    lanes: int  # of Lockstep

    def write(self) -> None:
        Path(self.folder, "task.json").write_text(json.dumps(asdict(self)))

    def array(self, name: str) -> Array:
        """images and tests [N, 1, 48, 48] fp32, normalized; test_bytes, the same as uint8; labels and
        test_labels; order [epoch, step, sample] int64.
        """
        return np.asarray(np.load(Path(self.folder, f"{name}.npy")))

    def weights(self) -> dict[str, Array]:
        """By Lockstep's names, in torch's layout, in the order of the layers."""
        found = load_file(Path(self.folder, "weights.safetensors"))
        return {name: found[name] for name in PARAMETERS}

    def channels_last_weights(self) -> list[Array]:
        """In the order of the layers, [in, out] each, for images [N, H, W, C]: for C++, Keras and JAX."""
        return [np.ascontiguousarray(_turn(weight)) for weight in self.weights().values()]


def read_task(folder: str) -> BaselineTask:
    """The task that was written to a folder."""
    return BaselineTask(**json.loads(Path(folder, "task.json").read_text()))


def _turn(weight: Array) -> Array:
    if weight.ndim == 2 and weight.shape[1] == 128 * 36:  # torch flattens channels first
        return weight.reshape(-1, 128, 6, 6).transpose(2, 3, 1, 0).reshape(128 * 36, -1)
    return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
