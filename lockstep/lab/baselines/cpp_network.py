"""emotion48 in C++, called from Python: gradient, descent, prediction, and the compiler's limit."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np

from lockstep.lab.baselines.baseline_task import CLASSES, Array
from lockstep.native.c_library import build_library, compile_c

_FOLDER = Path(__file__).with_name("cpp")
OPERATIONS = 2 * (
    48 * 48 * 9 * 32 * 2 + 3 * (24 * 24 * 288 * 64 + 12 * 12 * 576 * 128 + 4608 * 256 + 256 * 7)
)
# of one image's step: the first layer has no data gradient
_ROUNDS = 1_000_000


def build_network(path: Path) -> Path:
    """Compile the network into a library."""
    return build_library(_source("network.cpp"), path, "c++")


class CppNetwork:
    """Its parameters are one flat array, each layer [in, out]: see BaselineTask.channels_last_weights."""

    def __init__(self, library: Path, weights: list[Array]) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.add_gradient.restype = ctypes.c_double
        self.weights = np.concatenate([weight.ravel() for weight in weights]).astype(np.float32)
        self.gradient = np.zeros_like(self.weights)
        assert self._library.parameter_count() == len(self.weights)

    def find_gradient(self, images: Array, labels: Array, share: float) -> float:
        """The sum of the losses; `gradient` is that of the sum times `share`."""
        images, labels = np.ascontiguousarray(images, np.float32), np.ascontiguousarray(labels, np.int32)
        self.gradient.fill(0)
        size, factor = ctypes.c_long(len(images)), ctypes.c_float(share)
        at = _address(self.weights), _address(images), _address(labels)
        return float(self._library.add_gradient(*at, size, factor, _address(self.gradient)))

    def descend(self, rate: float) -> None:
        """One step of SGD."""
        self._library.descend(_address(self.weights), _address(self.gradient), ctypes.c_float(rate))

    def predict(self, images: Array) -> Array:
        images, scores = (
            np.ascontiguousarray(images, np.float32),
            np.empty((len(images), CLASSES), np.float32),
        )
        size = ctypes.c_long(len(images))
        self._library.predict(_address(self.weights), _address(images), size, _address(scores))
        return scores


def measure_limit(rounds: int = 30) -> float:
    """The most operations a second that the compiler gets out of one core: multiply-adds and nothing else."""
    library = compile_c(_source("bound.cpp"), "c++")
    library.multiply_add.restype = ctypes.c_double
    found = list[float]()
    for _ in range(rounds):
        clock = time.perf_counter()
        library.multiply_add(ctypes.c_long(_ROUNDS))
        found.append(time.perf_counter() - clock)
    return float(library.round_operations() * _ROUNDS / min(found))


def _source(name: str) -> str:
    return "".join((_FOLDER / each).read_text(encoding="utf-8") for each in ("tile.h", name))


def _address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
