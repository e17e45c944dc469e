"""All lanes at once: the bits of one lane after another, or not used."""

import copy

import pytest
import torch
from small import small_run, train
from torch import nn

from lockstep.comm.tree import LaneTree
from lockstep.data.loader import Lanes
from lockstep.kernels.stock.batched_conv import batched_conv2d
from lockstep.kernels.stock.batched_linear import batched_linear
from lockstep.lower import batched as module
from lockstep.lower.batched import BatchedLanes, chain_of, same_bits
from lockstep.lower.choose import Sample, lower_for_host
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.models import build

CROSS_ENTROPY = nn.functional.cross_entropy


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return build("lenet5", in_channels=1, num_classes=10, image_size=(28, 28))


def batch(lanes: int = 4, size: int = 32) -> Lanes:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(lanes * size, 1, 28, 28, generator=generator)
    return Lanes(images, torch.randint(0, 10, (lanes * size,), generator=generator), lanes)


def test_a_small_chain_runs_together_and_has_the_bits_of_the_reference() -> None:
    model, lanes = lenet(), batch()
    lowered = lower_for_host(model, CROSS_ENTROPY, seed=0, half=None, sample=Sample(lambda: lanes))
    reference = LaneByLane(copy.deepcopy(model), CROSS_ENTROPY, 0, None)
    if not isinstance(lowered, BatchedLanes):
        pytest.skip("stock kernels of this CPU depend on the batch, so lanes run one after another")
    tree = LaneTree()
    for output in reference.run(lanes, 3):
        tree.add([output.loss, *output.grads])
    height, expected = tree.root()
    (found,) = lowered.run(lanes, 3)
    assert found.height == height == 2
    for a, b in zip([found.loss, *found.grads], expected, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_whole_run_has_the_same_weights_either_way(tmp_path, monkeypatch) -> None:
    run = small_run("train.batch=128", "train.lanes=4", "train.epochs=3")
    one, _ = train(run, tmp_path)
    monkeypatch.setattr(module, "_SMALL_BYTES", 0)  # nothing is small: one lane after another
    other, _ = train(run, tmp_path)
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]
    assert one.summary["optimizer_sha256"] == other.summary["optimizer_sha256"]


def test_a_way_with_other_bits_is_not_used() -> None:
    class Wrong(BatchedLanes):
        def run(self, lanes, step):
            for output in super().run(lanes, step):
                bits = output.grads[0].view(torch.int32)
                bits[0] ^= 1  # one unit in the last place of one gradient
                yield output

    model, lanes = lenet(), batch()
    chain = chain_of(model)
    assert chain is not None
    assert not same_bits(
        Wrong(model, CROSS_ENTROPY, 0, chain), LaneByLane(model, CROSS_ENTROPY, 0, None), lanes
    )


def test_large_activations_run_one_lane_after_another() -> None:
    torch.manual_seed(0)
    model = build("emotion48", in_channels=1, num_classes=7, image_size=(28, 28))
    lanes = batch(lanes=4, size=64)
    lowered = lower_for_host(model, CROSS_ENTROPY, seed=0, half=None, sample=Sample(lambda: lanes))
    assert type(lowered) is LaneByLane


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


SHARED = nn.Linear(4, 4)
NOT_CHAINS = {
    "batch norm": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
    "dropout": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    "own forward": Twice(nn.Linear(4, 4)),
    "used twice": nn.Sequential(SHARED, nn.ReLU(), SHARED),
    "frozen": nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)),
    "circular padding": nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")),
    "a parameter of its own": nn.Sequential(nn.Linear(4, 4)),
}
NOT_CHAINS["a parameter of its own"].register_parameter("extra", nn.Parameter(torch.zeros(1)))


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda *_: None),
    "container": lambda m: m.blocks.register_forward_pre_hook(lambda *_: None),
    "backward": lambda m: m.blocks.classifier.register_full_backward_pre_hook(lambda *_: None),
    "parameter": lambda m: m.blocks.classifier.weight.register_hook(lambda g: g),
    "own forward": lambda m: setattr(m.blocks, "forward", m.blocks.forward),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_model_with_hooks_is_left_to_the_reference(name: str) -> None:
    model = lenet()
    HOOKS[name](model)
    assert chain_of(model) is None


@pytest.mark.parametrize("name", NOT_CHAINS)
def test_what_is_no_chain_of_known_layers_is_left_to_the_reference(name: str) -> None:
    assert chain_of(NOT_CHAINS[name]) is None


def test_lenet_is_a_chain_in_order() -> None:
    chain = chain_of(lenet())
    assert chain is not None
    images = torch.randn(2, 1, 28, 28)
    hidden = images
    for layer in chain:
        hidden = layer(hidden)
    assert torch.equal(hidden, lenet()(images))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 0, 1), (2, 1, 2), ((1, 2), (2, 0), 1)])
def test_conv_against_autograd_in_float64(bias, stride, padding, groups) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, stride, padding, groups=groups, bias=bias).double()
    x = torch.randn(6, 4, 9, 7, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(layer(x))
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x), inputs, grad)
    found = torch.autograd.grad(batched_conv2d(x, layer, 2), inputs, grad)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_against_autograd_in_float64(bias) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, bias=bias).double()
    x = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(8, 3, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x), inputs, grad)
    found = torch.autograd.grad(batched_linear(x, layer.weight, layer.bias, 4), inputs, grad)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
