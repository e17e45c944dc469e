"""Names of tensors in files of torchvision and timm, and the names that they have here.

`weights.py` asks for them when a file has names of that kind. Both libraries name residual networks alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from lockstep.models.alexnet import AlexNet
from lockstep.models.googlenet import GoogLeNet
from lockstep.models.resnet import ResNet
from lockstep.models.vgg11 import VGG11

_MARKS: dict[type[nn.Module], str] = {  # one name that every file of such a model has
    ResNet: "layer1.0.conv1.weight",
    VGG11: "features.0.weight",
    AlexNet: "features.0.weight",
    GoogLeNet: "inception3a.branch1.conv.weight",
}
_OTHERS: dict[type[nn.Module], str] = {  # published under the same name, but another network
    AlexNet: "torchvision's alexnet has other widths, no groups and no response normalization",
    GoogLeNet: "torchvision's googlenet has batch norms, and 3x3 convolutions where the paper has 5x5",
}
_RESNET = (
    (r"conv1\.", "blocks.stem.0."),
    (r"bn1\.", "blocks.stem.1."),
    (r"layer(\d)\.(\d+)\.conv1\.", r"blocks.layer\1_\2.main.0."),
    (r"layer(\d)\.(\d+)\.bn1\.", r"blocks.layer\1_\2.main.1."),
    (r"layer(\d)\.(\d+)\.conv2\.", r"blocks.layer\1_\2.main.3."),
    (r"layer(\d)\.(\d+)\.bn2\.", r"blocks.layer\1_\2.main.4."),
    (r"layer(\d)\.(\d+)\.conv3\.", r"blocks.layer\1_\2.main.6."),
    (r"layer(\d)\.(\d+)\.bn3\.", r"blocks.layer\1_\2.main.7."),
    (r"layer(\d)\.(\d+)\.downsample\.", r"blocks.layer\1_\2.shortcut."),
    (r"fc\.", "blocks.classifier.1."),
)
_VGG11 = (
    (r"features\.0\.", "blocks.block1.0."),
    (r"features\.3\.", "blocks.block2.0."),
    (r"features\.6\.", "blocks.block3.0."),
    (r"features\.8\.", "blocks.block3.2."),
    (r"features\.11\.", "blocks.block4.0."),
    (r"features\.13\.", "blocks.block4.2."),
    (r"features\.16\.", "blocks.block5.0."),
    (r"features\.18\.", "blocks.block5.2."),
    (r"classifier\.0\.", "blocks.hidden1.1."),
    (r"classifier\.3\.", "blocks.hidden2.1."),
    (r"classifier\.6\.", "blocks.classifier."),
)
_TABLES: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {ResNet: _RESNET, VGG11: _VGG11}


def is_foreign(model: nn.Module, keys: Iterable[str]) -> bool:
    """Whether the names in a file are those that torchvision and timm give this kind of model."""
    return _MARKS.get(type(model)) in set(keys)


def own_names(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Maps our name of each tensor to its name in the file; a name without one of ours stays as it is."""
    return {_rename(_TABLES[type(model)], key): key for key in keys}


def why_other(model: nn.Module) -> str:
    """Why such a file does not fit this model, whatever its names; empty if it does."""
    return _OTHERS.get(type(model), "")


def _rename(table: Iterable[tuple[str, str]], key: str) -> str:
    for pattern, ours in table:
        if re.match(pattern, key):
            return re.sub(rf"^{pattern}", ours, key)
    return key
