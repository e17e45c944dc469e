"""Operations of the compiled set in parts: each is at its place, and lies as torch's compiler expects."""

from __future__ import annotations

import pytest
import torch
from images import DEVICE, near
from torch import Tensor

from lockstep.kernels.stock.custom_op import (
    conv_data_grad,
    conv_forward,
    conv_weight_grad,
    product,
    product_weight_grad,
)
from lockstep.kernels.stock.product_cut import LayerCuts, ProductCut
from lockstep.kernels.stock.stock_conv import lying_last

OPTIONS = [2, 2], [1, 1], [1, 1], 1, 2


def values(*shape: int) -> Tensor:
    found = torch.randn(*shape, device=DEVICE)
    return lying_last(found) if len(shape) == 4 else found


X, W, G = values(4, 6, 7, 5), values(9, 6, 3, 3), values(4, 9, 4, 3)
ROWS, MATRIX, GRADS = values(4, 12), values(7, 12), values(4, 7)
CALLS = {  # operation, its arguments, the name and the dimension of what is cut, its channels
    "forward": (conv_forward, (X, W, *OPTIONS, True), 1, 9),
    "input_grad": (conv_data_grad, (G, X, W, *OPTIONS, False), 1, 6),
    "weight_grad": (conv_weight_grad, (G, X, W, *OPTIONS), 0, 9),
    "forward linear": (product, (ROWS, MATRIX, 2, True), 1, 7),
    "input_grad linear": (product, (GRADS, MATRIX, 2, False), 1, 12),
    "weight_grad linear": (product_weight_grad, (GRADS, ROWS, 2), 0, 7),
}


@pytest.mark.parametrize("name", CALLS)
def test_parts_are_the_whole_and_lie_as_the_compiler_expects(name: str) -> None:
    operation, given, dim, channels = CALLS[name]
    whole = operation(*given)
    ranges = [range(2), range(2, 3), range(3, channels)]
    for own in ranges:

        def fill(found: Tensor, along: int, own: range = own) -> None:
            """What the others would send."""
            assert along == dim
            for other in ranges:
                if other != own:
                    part = whole.narrow(dim, other.start, len(other))
                    found.narrow(dim, other.start, len(other)).copy_(part)

        cuts = LayerCuts({name.split(maxsplit=1)[0]: ProductCut(channels, own, fill)})
        found = operation(*given, cuts.place)
        near(found, whole.double())
        assert found.stride() == whole.stride()
        torch.library.opcheck(operation, (*given, cuts.place), test_utils=["test_schema", "test_faketensor"])


def test_a_place_is_forgotten_with_its_cuts() -> None:
    place = LayerCuts({}).place
    with pytest.raises(KeyError):
        conv_forward(X, W, *OPTIONS, True, place)
