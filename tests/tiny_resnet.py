"""A residual network with blocks of one's choice."""

from torch import nn

from lockstep.kernels.global_average import GlobalAverage
from lockstep.models.block import BlockModel
from lockstep.models.resnet import Residual, ResNet


class TinyResNet(ResNet):
    """A residual network small enough for the interpreter."""

    def __init__(self, *middle: Residual, channels: int, colours: int = 3) -> None:
        stem = nn.Sequential(nn.Conv2d(colours, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        last = nn.Sequential(GlobalAverage(), nn.Linear(channels, 10))
        BlockModel.__init__(self, {str(n): part for n, part in enumerate((stem, *middle, last))})
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
