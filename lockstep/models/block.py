"""The base class of all models, which is a sequence of named blocks, and the layers that models share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn


class BlockModel(nn.Module):
    """A model whose eval forward is its `blocks`, one after another; the last is the classifier."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(OrderedDict(blocks))

    def forward(self, x: Tensor) -> Any:
        return self.blocks(x)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The named modules that, applied in order, are the model's forward pass in eval mode.

    The attribute `blocks` of other classes is not used: it may mean something else (timm's transformers).
    """
    chain = model.blocks if isinstance(model, BlockModel) else model
    if isinstance(chain, nn.Sequential):
        # named_children() would leave out a module that is used twice.
        return [(name, child) for name, child in chain._modules.items() if child is not None]
    return [("model", model)]


def conv_relu(in_channels: int, out_channels: int, kernel: int, **conv_options: Any) -> list[nn.Module]:
    """A convolution and a ReLU, in place because the convolution's backward does not read its output."""
    return [nn.Conv2d(in_channels, out_channels, kernel, **conv_options), nn.ReLU(inplace=True)]


def hidden(in_features: int, out_features: int, dropout: float) -> nn.Sequential:
    """Flatten, a fully connected layer and a ReLU, then dropout unless it is 0."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(in_features, out_features), nn.ReLU(inplace=True)]
    if dropout > 0:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def out_side(side: int, kernel: int, stride: int = 1, padding: int = 0) -> int:
    """The output side in pixels of a convolution or pooling whose input side is `side`."""
    return (side + 2 * padding - kernel) // stride + 1


def init_for_relu(model: nn.Module) -> None:
    """He initialization with zero biases: with torch's default, deep nets without norms do not learn.

    A linear layer without a ReLU after it is a classifier. Its small weights keep the first loss near
    ln(classes).
    """
    chains = [module for module in model.modules() if isinstance(module, nn.Sequential)]
    before_relu = {
        layer for chain in chains for layer, after in pairwise(chain) if isinstance(after, nn.ReLU)
    }
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if module in before_relu:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            else:
                nn.init.normal_(module.weight, std=0.01)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
