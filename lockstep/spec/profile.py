"""A Profile: what a run's model costs, layer by layer, counted and, if it was measured, in seconds.

profile → planner. Seconds are of one worker; numbers of values and multiplications are of one image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from lockstep.errors import SpecError
from lockstep.spec.field import accept_number
from lockstep.spec.run import PRECISIONS

LAYER_KINDS = ("convolution", "fully connected", "norm", "pooling", "activation", "other")


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer for a number of images, forward and backward, and what part of it: `channel=2`."""

    images: int
    forward_s: float
    backward_s: float
    part: str = ""  # empty: all of it

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class LayerProfile:
    """One call of the model."""

    name: str
    kind: str
    macs: float  # multiplications, forward
    parameters: int
    inputs: int  # values
    outputs: int  # values
    rows: int = 1  # of its output
    channels: int = 1  # of its output
    halo: int = 0  # rows that it needs from each neighbour
    groups: int = 1
    times: tuple[LayerTime, ...] = ()

    @property
    def whole(self) -> dict[int, LayerTime]:
        """Times of all of the layer, by number of images."""
        return {time.images: time for time in self.times if not time.part}

    @property
    def relative_rates(self) -> dict[int, float]:
        """Images a second with each number of images at once, over the most with any."""
        rates = {images: images / max(time.both_s, 1e-12) for images, time in self.whole.items()}
        return {images: rate / max(rates.values()) for images, rate in rates.items()}

    def fewest_images(self, share: float) -> int:
        """The smallest number of images at once with which it has this share of its best rate."""
        return min(images for images, rate in self.relative_rates.items() if rate >= share)


@dataclass(frozen=True)
class LanesTime:
    """Seconds of a whole step that one worker takes alone, with some lanes of some images each."""

    lanes: int
    images: int
    seconds: float


@dataclass(frozen=True)
class LoadTime:
    """Seconds that the run's loader takes to bring some images, if it does nothing else."""

    images: int
    seconds: float


@dataclass(frozen=True)
class WeightShape:
    """A parameter that is trained."""

    name: str
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Profile:
    """A model in layers, and the seconds of a step that are not in them."""

    model: str
    shape: tuple[int, int, int]  # of an image: channels, rows, columns
    classes: int
    precision: str
    kernels: str
    layers: tuple[LayerProfile, ...]
    device: str = ""  # empty: nothing was measured
    lanes: tuple[LanesTime, ...] = ()
    update_s: float = 0.0  # of all parameters, once a step
    train_images: int = 0
    loading: tuple[LoadTime, ...] = ()  # empty: not measured
    how: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[WeightShape, ...] = ()  # in the model's order; empty: only their number by layer is known
    buffers: tuple[int, ...] = ()  # values of each floating buffer, whose means travel beside the gradients

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise SpecError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if not self.layers:
            raise SpecError("layers is empty: a model has one layer or more")
        for part in (
            self,
            *self.layers,
            *(time for layer in self.layers for time in layer.times),
            *self.lanes,
        ):
            _check_numbers(part)
        for what, size in (
            *((f"weights.{each.name}", size) for each in self.weights for size in each.shape),
            *(("buffers", size) for size in self.buffers),
        ):
            if type(size) is not int or size < 1:
                raise SpecError(f"{what}={size!r} must be whole numbers from 1")

    @cached_property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def sizes(self) -> list[int]:
        """Numbers of images with which every layer was timed, in rising order."""
        return sorted(self.layers[0].whole)

    @property
    def macs(self) -> float:
        """Multiplications of one image, forward."""
        return sum(layer.macs for layer in self.layers)


_ABOVE_ZERO = ("images", "lanes", "rows", "channels", "groups")


def _check_numbers(part: Any) -> None:
    """Refuse what is no number, or one that nothing can take."""
    for item in fields(part):
        if item.type in ("int", "float"):
            value, above = getattr(part, item.name), item.name in _ABOVE_ZERO
            number = accept_number(item.name, value)
            if number < 0 or (above and not number):
                raise SpecError(f"{item.name}={value} must be {'above 0' if above else '0 or more'}")


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as JSON."""
    path.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Read what `write_profile` wrote; a line that names the file if it is something else."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(table)
    except OSError as error:
        raise SpecError(f"{path}: cannot read the file: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError, SpecError) as error:
        raise SpecError(f"{path}: not a profile: {error}; `lockstep profile` writes one") from None


def _from_json(table: dict[str, Any]) -> Profile:
    layers = [
        LayerProfile(**{**row, "times": tuple(LayerTime(**time) for time in row["times"])})
        for row in table["layers"]
    ]
    parts = {
        "shape": tuple(table["shape"]),
        "layers": tuple(layers),
        "lanes": tuple(LanesTime(**row) for row in table["lanes"]),
        "loading": tuple(LoadTime(**row) for row in table.get("loading", ())),  # older files have none
        "weights": tuple(WeightShape(row["name"], tuple(row["shape"])) for row in table.get("weights", ())),
        "buffers": tuple(table.get("buffers", ())),
    }
    return Profile(**{**table, **parts})
