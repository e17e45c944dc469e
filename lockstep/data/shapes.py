"""The built-in data set `shapes`: labelled pictures of geometric figures, computed from seed and index.

Data pipeline: store → order → augment → loader; this file makes a store. It uses only + − × ÷, comparisons
and square roots of float32 and int64, one tensor operation each, so that pixels are equal on every machine.
Shapes: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lockstep.data.data_set import DataSet
from lockstep.data.store import MemorySplit, Split, Store, check_size
from lockstep.errors import DataError
from lockstep.kernels.random import integers, key, uniform

VERSION = 1  # of the generator, part of a run's identity: raise it with any change to a pixel
IN_MEMORY_BYTES = 1 << 30
_CHUNK_PIXELS = 1 << 17  # small enough that a chunk's temporaries stay in the cache

Figure = Callable[[Tensor, Tensor], Tensor]  # (u, v) in the unit circle → distance, negative inside


def _norm(u: Tensor, v: Tensor) -> Tensor:
    return (u * u + v * v).sqrt()


def _box(u: Tensor, v: Tensor, half_width: float, half_height: float) -> Tensor:
    return torch.maximum(u.abs() - half_width, v.abs() - half_height)


_PENTAGON = ((0.0, 1.0), (0.9511, 0.309), (0.5878, -0.809), (-0.5878, -0.809), (-0.9511, 0.309))


def _star(u: Tensor, v: Tensor) -> Tensor:
    """A five-pointed star: the points on the inner side of at least four of a pentagon's five sides."""
    first, *others = (u * x + v * y for x, y in _PENTAGON)
    highest, second = first, torch.full_like(first, -9.0)
    for side in others:
        second = torch.maximum(second, torch.minimum(highest, side))
        highest = torch.maximum(highest, side)
    return second - 0.36


def _three_dots(u: Tensor, v: Tensor) -> Tensor:
    side = u.abs() - 0.55
    return torch.minimum(_norm(side, v - 0.4), _norm(u, v + 0.55)) - 0.33


FIGURES: dict[str, Figure] = {
    "disc": lambda u, v: _norm(u, v) - 0.85,
    "ring": lambda u, v: (_norm(u, v) - 0.72).abs() - 0.2,
    "square": lambda u, v: _box(u, v, 0.78, 0.78),
    "triangle": lambda u, v: torch.maximum(v, u.abs() * 0.866 - v * 0.5) - 0.5,
    "cross": lambda u, v: torch.minimum(_box(u, v, 0.95, 0.25), _box(u, v, 0.25, 0.95)),
    "star": _star,
    "bar": lambda u, v: _box(u, v, 1.0, 0.24),
    "bars": lambda u, v: _box(u, v.abs() - 0.5, 0.85, 0.22),
    "crescent": lambda u, v: torch.maximum(_norm(u, v) - 0.9, 0.7 - _norm(u - 0.5, v)),
    "dots": lambda u, v: _norm(u.abs() - 0.55, v) - 0.35,
    "corner": lambda u, v: torch.minimum(_box(u + 0.5, v, 0.25, 0.8), _box(u, v - 0.55, 0.75, 0.25)),
    "tee": lambda u, v: torch.minimum(_box(u, v + 0.6, 0.85, 0.22), _box(u, v - 0.1, 0.22, 0.8)),
    "chevron": lambda u, v: torch.maximum((v - u.abs() + 0.3).abs() * 0.707 - 0.22, u.abs() - 0.8),
    "frame": lambda u, v: (torch.maximum(u.abs(), v.abs()) - 0.65).abs() - 0.18,
    "three dots": _three_dots,
    "half disc": lambda u, v: torch.maximum(_norm(u, v) - 0.95, v - 0.1),
    "hourglass": lambda u, v: torch.maximum((u.abs() - v.abs()) * 0.707 - 0.08, v.abs() - 0.8),
    "aitch": lambda u, v: torch.minimum(_box(u.abs() - 0.6, v, 0.2, 0.85), _box(u, v, 0.6, 0.2)),
    "oval": lambda u, v: _norm(u, v * 1.8) - 0.95,
    "target": lambda u, v: torch.minimum((_norm(u, v) - 0.8).abs() - 0.15, _norm(u, v) - 0.35),
}


@dataclass(frozen=True)
class ShapesOptions:
    """What a user may set under `data.` for shapes."""

    size: int = 28
    channels: int = 1
    classes: int = 10
    num_train: int = 12000
    num_test: int = 2000
    seed: int = 0
    num_val: int = 0  # with some, the test images are for the end alone

    def __post_init__(self) -> None:
        if not 2 <= self.classes <= len(FIGURES):
            raise DataError(
                f"data.classes={self.classes}: shapes has {len(FIGURES)} figures; choose 2 to {len(FIGURES)}"
            )
        for name, least in (("size", 8), ("channels", 1), ("num_train", 1), ("num_test", 1), ("num_val", 0)):
            if getattr(self, name) < least:
                raise DataError(f"data.{name}={getattr(self, name)}: shapes needs at least {least}")
        check_size(self.size)


def open_shapes(options: ShapesOptions) -> Store:
    """Draw the whole set now if it fits into 1 GiB, else each image when it is read."""
    counts = {"train": options.num_train, "test": options.num_test, "val": options.num_val}
    splits: dict[str, Split] = {part: DrawnSplit(options, part, n) for part, n in counts.items() if n}
    if sum(counts.values()) * options.channels * options.size**2 <= IN_MEMORY_BYTES:
        splits = {part: MemorySplit(*split.read(torch.arange(len(split)))) for part, split in splits.items()}
    told = asdict(options)
    if not options.num_val:
        del told["num_val"]  # as in runs that were made before there was such a key
    return Store(
        name="shapes",
        classes=tuple(FIGURES)[: options.classes],
        shape=(options.channels, options.size, options.size),
        train=splits["train"],
        test=splits["test"],
        val=splits.get("val"),
        mean=(0.46,) * options.channels,
        std=(0.22,) * options.channels,
        manifest={"name": "shapes", "version": VERSION, **told},
    )


@dataclass(frozen=True)
class DrawnSplit:
    """A split whose images are drawn when they are read."""

    options: ShapesOptions
    part: str
    num_images: int

    def __len__(self) -> int:
        return self.num_images

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        size, channels = self.options.size, self.options.channels
        draw = _Draw(self.options, self.part)
        images = torch.empty((len(ids), channels, size, size), dtype=torch.uint8)
        labels = draw.integers("label", ids, self.options.classes)
        step = max(1, _CHUNK_PIXELS // (size * size * channels))
        for start in range(0, len(ids), step):
            chunk = slice(start, start + step)
            images[chunk] = _paint(draw, ids[chunk], labels[chunk])
        return images, labels


@dataclass(frozen=True)
class _Draw:
    """The random numbers of one split: each property has its own key, and the image's id is the counter."""

    options: ShapesOptions
    part: str

    def _key(self, name: str) -> int:
        return key("shapes", self.options.seed, self.part, name)

    def integers(self, name: str, ids: Tensor, bound: int) -> Tensor:
        return integers(self._key(name), ids, bound)

    def between(self, name: str, ids: Tensor, low: float, high: float) -> Tensor:
        """One number in [low, high) for each image, shaped [N, 1, 1]."""
        return (uniform(self._key(name), ids) * (high - low) + low)[:, None, None]

    def pixels(self, name: str, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A number in [0, 1) for each element of each image, shaped [N, *shape]."""
        count = math.prod(shape)
        counter = ids[:, None] * count + torch.arange(count)
        return uniform(self._key(name), counter).view(-1, *shape)


_NUM_ANGLES = 256  # in a full turn; sines are rounded, since libraries differ in the last bit
_SINE = torch.tensor([round(4096 * math.sin(math.tau * i / _NUM_ANGLES)) for i in range(_NUM_ANGLES)])


def _turn(draw: _Draw, name: str, ids: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, 1, 1] of a random angle of at most `most`/256 of a turn in either direction."""
    angle = draw.integers(name, ids, 2 * most + 1)[:, None, None] - most
    cosine, sine = _SINE[(angle + _NUM_ANGLES // 4) % _NUM_ANGLES], _SINE[angle % _NUM_ANGLES]
    return cosine.float() * (1 / 4096), sine.float() * (1 / 4096)


def _paint(draw: _Draw, ids: Tensor, labels: Tensor) -> Tensor:
    """Draw uint8 images [N, C, H, W]: background, clutter and figure, tinted by channel, and noise."""
    channels, size = draw.options.channels, draw.options.size
    axis = torch.arange(size, dtype=torch.float32) * 2 + (1 - size)  # in half pixels from the centre
    inverted = (draw.integers("polarity", ids, 4) == 0)[:, None, None]  # one image in four is dark on light
    contrast = draw.between("contrast", ids, 100.0, 150.0)
    contrast = torch.where(inverted, -contrast, contrast)
    grey = draw.between("level", ids, -20.0, 20.0) - contrast * 0.4 + 128.0
    ink = _figure_cover(draw, ids, labels, axis) * contrast + _clutter(draw, ids, axis)
    images = ink[:, None] * _tint(draw, ids, channels) + grey[:, None]
    noise = draw.pixels("noise", ids, (channels, size, size)) - 0.5
    images = images + noise * draw.between("noise level", ids, 8.0, 32.0)[:, None]
    return (images.clamp(0.0, 255.0) + 0.5).to(torch.uint8)


def _tint(draw: _Draw, ids: Tensor, channels: int) -> Tensor:
    """How strongly each channel shows the ink [N, C, 1, 1]; a single channel shows it fully."""
    if channels == 1:
        return torch.ones(1)
    return draw.pixels("tint", ids, (channels, 1, 1)) * 0.7 + 0.3


def _figure_cover(draw: _Draw, ids: Tensor, labels: Tensor, axis: Tensor) -> Tensor:
    """How much of each pixel the figure covers [N, H, W], 0 to 1."""
    size = draw.options.size
    radius = draw.between("radius", ids, 0.65, 0.88)
    room = (1.0 - radius) * size
    across, down = draw.between("across", ids, -1.0, 1.0) * room, draw.between("down", ids, -1.0, 1.0) * room
    cosine, sine = _turn(draw, "angle", ids, 12)
    x = (axis[None, None, :] - across) / (radius * size)
    y = (axis[None, :, None] - down) / (radius * size)
    u, v = x * cosine + y * sine, y * cosine - x * sine
    distance = torch.empty_like(u)
    for label, figure in enumerate(tuple(FIGURES.values())[: draw.options.classes]):
        members = torch.nonzero(labels == label)[:, 0]
        distance[members] = figure(u[members], v[members])
    return (0.5 - distance * (radius * (0.5 * size))).clamp(0.0, 1.0)


def _clutter(draw: _Draw, ids: Tensor, axis: Tensor) -> Tensor:
    """Faint spots and a brightness gradient, independent of the label, as ink [N, H, W]."""
    size = draw.options.size
    slope_x = draw.between("slope x", ids, -20.0, 20.0) * (axis[None, None, :] / size)
    slope_y = draw.between("slope y", ids, -20.0, 20.0) * (axis[None, :, None] / size)
    ink = slope_x + slope_y
    for i in range(3):
        x = axis[None, None, :] / size - draw.between(f"spot {i} across", ids, -0.9, 0.9)
        y = axis[None, :, None] / size - draw.between(f"spot {i} down", ids, -0.9, 0.9)
        scale = draw.between(f"spot {i} scale", ids, 40.0, 120.0)
        spot = (1.5 - (x * x * scale + y * y * scale)).clamp(0.0, 1.0)
        ink = ink + spot * draw.between(f"spot {i} ink", ids, -60.0, 60.0)
    return ink


DATA_SETS = (DataSet("shapes", ShapesOptions, generate=open_shapes),)
