"""The convolutions of well-known networks, as shapes: on 28×28 digits for LeNet, on 224×224 images else."""

from __future__ import annotations

from dataclasses import replace

from lockstep.lab.conv.conv_shape import ConvShape

_INCEPTIONS = (  # side, channels; then filters: 1×1, before 3×3, 3×3, before 5×5, 5×5, after pooling
    (28, 192, 64, 96, 128, 16, 32, 32),
    (28, 256, 128, 128, 192, 32, 96, 64),
    (14, 480, 192, 96, 208, 16, 48, 64),
    (14, 512, 160, 112, 224, 24, 64, 64),
    (14, 512, 128, 128, 256, 24, 64, 64),
    (14, 512, 112, 144, 288, 32, 64, 64),
    (14, 528, 256, 160, 320, 32, 128, 128),
    (7, 832, 256, 160, 320, 32, 128, 128),
    (7, 832, 384, 192, 384, 48, 128, 128),
)


def network_layers() -> dict[str, tuple[ConvShape, ...]]:
    """The different convolutions of each network, for one image."""
    each = {"LeNet": _lenet(), "AlexNet": _alexnet(), "GoogLeNet": _googlenet(), "ResNet": _resnet()}
    return {name: tuple(dict.fromkeys(layers)) for name, layers in each.items()}


def sample_layers(batch: int) -> dict[str, ConvShape]:
    """A few of them, of every kind."""
    chosen = {
        "LeNet, second": _lenet()[1],
        "AlexNet, first": _alexnet()[0],
        "AlexNet, second": _alexnet()[1],
        "GoogLeNet, 3×3 of 3b": _layer(128, 192, 28, 3),
        "GoogLeNet, 5×5 of 4e": _layer(32, 128, 14, 5),
        "ResNet, 3×3 at 56": _layer(64, 64, 56, 3),
        "ResNet, 3×3 at 14": _layer(256, 256, 14, 3),
    }
    return {name: replace(shape, batch=batch) for name, shape in chosen.items()}


def _layer(inside: int, outside: int, side: int, kernel: int, stride: int = 1, groups: int = 1) -> ConvShape:
    """With padding that keeps the size."""
    return ConvShape(1, inside, outside, side, side, kernel, stride, kernel // 2, 1, groups)


def _lenet() -> list[ConvShape]:
    return [_layer(1, 6, 28, 5), ConvShape(1, 6, 16, 14, 14, 5)]


def _alexnet() -> list[ConvShape]:
    return [
        ConvShape(1, 3, 96, 224, 224, 11, stride=4, padding=2),
        _layer(96, 256, 27, 5, groups=2),
        _layer(256, 384, 13, 3),
        _layer(384, 384, 13, 3, groups=2),
        _layer(384, 256, 13, 3, groups=2),
    ]


def _googlenet() -> list[ConvShape]:
    """Without the two heads that only training has."""
    found = [_layer(3, 64, 224, 7, 2), _layer(64, 64, 56, 1), _layer(64, 192, 56, 3)]
    for side, channels, one, three_in, three, five_in, five, pooled in _INCEPTIONS:
        found += [_layer(channels, filters, side, 1) for filters in (one, three_in, five_in, pooled)]
        found += [_layer(three_in, three, side, 3), _layer(five_in, five, side, 5)]
    return found


def _resnet() -> list[ConvShape]:
    """Of 50 layers: 1×1, 3×3 and 1×1 again in every block."""
    found, channels, side = [_layer(3, 64, 224, 7, 2)], 64, 56
    for width in (64, 128, 256, 512):
        stride = 1 if width == 64 else 2
        found += [_layer(channels, width, side, 1), _layer(width, width, side, 3, stride)]
        found.append(_layer(channels, 4 * width, side, 1, stride))
        channels, side = 4 * width, side // stride
        found += [_layer(width, channels, side, 1), _layer(channels, width, side, 1)]
        found.append(_layer(width, width, side, 3))
    return found
