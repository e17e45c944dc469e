"""The layers of a network in CUDA C++: buffers for a batch, and kernels that fill them.

Each keeps what its backward pass needs. Shapes: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from lockstep.lab.threads.grid_kernel import GridKernel

Make = Callable[[str, Mapping[str, int]], GridKernel]
_PARTS = 16  # of a long sum in a linear layer, at most


class CudaBlock:
    """Convolution 3 × 3, ReLU and 2 × 2 max pooling."""

    def __init__(
        self, make: Make, batch: int, side: int, weights: tuple[Tensor, ...], *, is_first: bool
    ) -> None:
        self.weight, self.bias, self.weight_gradient, self.bias_gradient = weights
        filters, channels = self.weight.shape[:2]
        self._filters, self._pixels = filters, side * side
        macros = {"CI": channels, "CO": filters, "H": side, "W": side}
        empty, pooling = self.weight.new_empty, {"H": side, "W": side}
        self._values = empty(batch, filters, side, side)  # then their gradients
        self.output = empty(batch, filters, side // 2, side // 2)
        self._weight_parts = empty(self.weight.numel() * self._pixels)
        self._bias_parts = empty(filters * self._pixels)
        self._forward = make("convolution_forward", macros)
        self._pool, self._unpool = make("pooling_forward", pooling), make("pooling_gradient", pooling)
        self._weight_gradient = make("convolution_weight_gradient", macros)
        self._add = make("add_parts", {})
        self._data_gradient = None if is_first else make("convolution_data_gradient", macros)
        self._input = self.input_gradient = empty(0)
        if not is_first:
            self.input_gradient = empty(batch, channels, side, side)

    def forward(self, images: Tensor, count: int) -> Tensor:
        """The first `count` images' pooled values."""
        self._input = images
        self._forward(images, self.weight, self.bias, self._values, count)
        self._pool(self._values, self.output, count * self._filters)
        return self.output

    def backward(self, gradient: Tensor, count: int) -> Tensor:
        """Gradients of weights, and of the input unless it is the images."""
        self._unpool(gradient, self._values, count * self._filters)
        self._weight_gradient(self._input, self._values, self._weight_parts, self._bias_parts, count)
        self._add(self._weight_parts, self.weight_gradient, self.weight.numel(), self._pixels)
        self._add(self._bias_parts, self.bias_gradient, self._filters, self._pixels)
        if self._data_gradient:
            self._data_gradient(self._values, self.weight, self.input_gradient, count)
        return self.input_gradient


class CudaLinear:
    """A fully connected layer, with ReLU if it is not the last."""

    def __init__(self, make: Make, batch: int, weights: tuple[Tensor, ...], *, has_relu: bool) -> None:
        self.weight, self.bias, self.weight_gradient, self.bias_gradient = weights
        outputs, inputs = self.weight.shape
        parts = max(part for part in (1, 2, 4, 8, _PARTS) if inputs % (4 * part) == 0)
        macros = {"IN": inputs, "OUT": outputs, "PARTS": parts, "HAS_RELU": int(has_relu)}
        empty = self.weight.new_empty
        self._parts = empty(batch * outputs * parts)
        self.output, self.input_gradient = empty(batch, outputs), empty(batch, inputs)
        self._multiply, self._sum = make("linear_parts", macros), make("linear_sum", macros)
        self._hide = make("relu_gradient", macros) if has_relu else None
        self._data_gradient = make("linear_data_gradient", macros)
        self._weight_gradient = make("linear_weight_gradient", macros)
        self._bias_gradient = make("linear_bias_gradient", macros)
        self._input = empty(0)

    def forward(self, values: Tensor, count: int) -> Tensor:
        """The first `count` images' results."""
        self._input = values
        self._multiply(values, self.weight, self._parts, count)
        self._sum(self._parts, self.bias, self.output, count)
        return self.output

    def backward(self, gradient: Tensor, count: int) -> Tensor:
        """Gradients of weights and of the input; `gradient` is changed."""
        if self._hide:
            self._hide(self.output, gradient, count)
        self._weight_gradient(self._input, gradient, self.weight_gradient, count)
        self._bias_gradient(gradient, self.bias_gradient, count)
        self._data_gradient(gradient, self.weight, self.input_gradient, count)
        return self.input_gradient


class FlatTensors:
    """Tensors of given shapes in one array, each from a multiple of four values on; the gaps are 0."""

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        sizes = [-(-prod(shape) // 4) * 4 for shape in shapes.values()]
        self.all = torch.zeros(sum(sizes), device=device)
        self.named = {
            name: piece[: prod(shape)].view(shape)
            for (name, shape), piece in zip(shapes.items(), torch.split(self.all, sizes), strict=True)
        }
