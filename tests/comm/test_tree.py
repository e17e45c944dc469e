"""The lane tree against an explicit recursive tree, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.comm.tree import LaneTree, tree_sum


def recursive_sum(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return recursive_sum(values[:half]) + recursive_sum(values[half:])


def lane_mean(lanes: list[list[Tensor]]) -> list[Tensor]:
    tree = LaneTree()
    for lane in lanes:
        tree.add([tensor.clone() for tensor in lane])
    return list(tree.mean())


def rows(num: int, size: int, seed: int) -> Tensor:
    """Values of very different size, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, size, generator=generator) * 10 ** torch.randn(num, size, generator=generator)


@settings(max_examples=30)
@given(st.integers(0, 6), st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(0, 2**32))
def test_the_mean_is_the_recursive_tree(height: int, sizes: list[int], seed: int) -> None:
    lanes = 1 << height
    columns = [rows(lanes, size, seed + index) for index, size in enumerate(sizes)]
    means = lane_mean([[column[lane] for column in columns] for lane in range(lanes)])
    for column, mean in zip(columns, means, strict=True):
        assert torch.equal(mean, recursive_sum(list(column)) * (1.0 / lanes))


def test_the_order_matters() -> None:
    """Teeth: summed one after another, the same values give other bits."""
    values = rows(8, 1000, 0)
    sequential = values[0].clone()
    for row in values[1:]:
        sequential += row
    assert not torch.equal(lane_mean([[row] for row in values])[0], sequential / 8)


def test_lanes_without_tensors_have_an_empty_mean() -> None:
    assert lane_mean([[], []]) == []


@pytest.mark.parametrize("lanes", [3, 5, 6, 7])
def test_an_incomplete_tree_has_no_mean(lanes: int) -> None:
    with pytest.raises(AssertionError, match="not complete"):
        lane_mean([[torch.ones(1)]] * lanes)


def test_few_partial_sums_are_alive() -> None:
    tree = LaneTree()
    for lane in range(63):
        tree.add([torch.ones(1)])
        assert len(tree._partial) == (lane + 1).bit_count()


@pytest.mark.parametrize("num", [*range(1, 34), 63, 64, 65, 100])
def test_tree_sum_is_the_recursive_tree_with_zeros_behind(num: int) -> None:
    values = rows(num, 13, num)
    size = 1 << (num - 1).bit_length()
    padded = [*values, *[torch.zeros(13)] * (size - num)]
    assert torch.equal(tree_sum(values), recursive_sum(padded))


def test_tree_sum_of_nothing_is_zero() -> None:
    assert torch.equal(tree_sum(torch.empty(0, 3)), torch.zeros(3))


def test_tree_sum_leaves_its_input_alone() -> None:
    values = rows(6, 5, 1)
    before = values.clone()
    tree_sum(values)
    assert torch.equal(values, before)
