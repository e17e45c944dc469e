"""LeNet-5 (LeCun et al., 1998), with a choice of activation and pooling.

Built by registry.build. Shapes: N samples, C channels, H, W pixels.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from lockstep.models.block import BlockModel, out_side

Activation = Literal["relu", "sigmoid", "tanh"]
Pooling = Literal["max", "average"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}
_POOLINGS: dict[str, type[nn.Module]] = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}


class LeNet5(BlockModel):
    """Two 5x5 convolutions with pooling, then 120, 84 and the classes."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: tuple[int, int],
        *,
        activation: Activation = "relu",
        pooling: Pooling = "max",
    ) -> None:
        act, pool = _ACTIVATIONS[activation], _POOLINGS[pooling]
        # The paper centres 28x28 digits in 32x32; padding the first layer is the same and saves the copy.
        padding = 2 if min(image_size) < 32 else 0
        height, width = (_last_side(side, padding) for side in image_size)
        super().__init__(
            {
                "block1": nn.Sequential(nn.Conv2d(in_channels, 6, 5, padding=padding), act(), pool(2)),
                "block2": nn.Sequential(nn.Conv2d(6, 16, 5), act(), pool(2)),
                "hidden1": nn.Sequential(nn.Flatten(), nn.Linear(16 * height * width, 120), act()),
                "hidden2": nn.Sequential(nn.Linear(120, 84), act()),
                "classifier": nn.Linear(84, num_classes),
            }
        )
        if activation != "relu":
            self._init_for_saturating(activation)

    def _init_for_saturating(self, activation: Activation) -> None:
        """Glorot: with torch's own, sigmoids stay on a plateau for many epochs."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=nn.init.calculate_gain(activation))


def _last_side(side: int, padding: int) -> int:
    return out_side(out_side(side, 5, padding=padding) // 2, 5) // 2
