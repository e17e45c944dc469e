"""Stock kernels on the device: layers that know lanes, all of them at once or one by one, with one result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from images import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.comm.tree import LaneTree, worker_lanes
from lockstep.data.loader import Lanes
from lockstep.errors import ModelError
from lockstep.kernels.global_average import GlobalAverage
from lockstep.kernels.loss import CrossEntropy
from lockstep.kernels.lrn import LRN
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.kernels.stock import custom_op
from lockstep.kernels.stock.lane_function import Conv, lane_conv2d
from lockstep.kernels.triton.conv.tile_table import Table
from lockstep.lower.compiled import compiled_layer
from lockstep.lower.compiled import conv_probe as at_once
from lockstep.lower.compiled.compiled_layer import LaneConv2d
from lockstep.lower.compiled.compiled_network import CompiledNetwork
from lockstep.lower.compiled.compiled_program import find_compiled, prove_lanes
from lockstep.lower.compiled.conv_probe import find_at_once
from lockstep.lower.device_lanes import DeviceLanes
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.program import DeviceLowering
from lockstep.models import build
from lockstep.models.googlenet import Inception
from lockstep.models.tensors import model_tensors, tensors_sha256
from lockstep.spec import Train


def branches() -> nn.Sequential:
    """Grouped and strided convolutions, response normalization, branches, overlapping pooling, dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True), LRN(3),
        nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True), Inception((8, 4, 4, 4, 2, 4, 4)), nn.AvgPool2d(2),
        GlobalAverage(), nn.Dropout(0.4), nn.Linear(16, 10),
    ).to(DEVICE)  # fmt: skip


def given(lanes: int, size: int, side: int = 12) -> Lanes:
    images = torch.randn(lanes * size, 3, side, side, generator=torch.Generator().manual_seed(2))
    return Lanes(images.to(DEVICE), torch.arange(lanes * size, device=DEVICE) % 10, lanes)


def prepare(model: nn.Module, lanes: Lanes) -> DeviceLanes:
    shape, train = lanes.images.shape, Train(batch=len(lanes.labels), lanes=lanes.num_lanes)
    program = find_compiled(model, (shape[1], shape[2], shape[3]), train)
    return DeviceLanes(model, DeviceLowering(program, Table(), train, torch.device(DEVICE)), 0)


@pytest.fixture(autouse=True)
def as_training() -> Iterator[None]:
    with plain_torch():
        prepare_device("auto", 1)
        yield


def sums(way: LaneByLane, lanes: Lanes) -> list[Tensor]:
    outputs = list(way.run(lanes, 3))
    each = ([o.loss, *o.grads, *o.float_buffers] for o in outputs)
    return [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]


def test_it_is_the_model_itself() -> None:
    """Against stock kernels in float64; dropout has the masks of the step through the host."""
    compare(branches, given(4, 3))


class Backwards(nn.Sequential):
    """Runs its layers from the last one to the first."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([*self._modules.values()][::-1])


@pytest.mark.parametrize("order", [nn.Sequential, Backwards])
def test_a_relu_joins_the_norm_that_it_follows(order: type[nn.Sequential]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        convs = [nn.Conv2d(3, 3, 3, bias=False) for _ in range(2)]
        norms = [nn.BatchNorm2d(3) for _ in range(2)]
        relu = nn.ReLU()
        layers = order(convs[0], norms[0], relu, convs[1], relu, norms[1])
        return nn.Sequential(layers, nn.Tanh(), GlobalAverage(), nn.Linear(3, 10)).to(DEVICE)

    compare(make, given(2, 4))


def test_heads_count_by_their_weight() -> None:
    """GoogLeNet as small as it can be, with both auxiliary heads."""

    def google() -> nn.Module:
        torch.manual_seed(0)
        return build("googlenet", in_channels=3, num_classes=10, image_size=(16, 16), options={}).to(DEVICE)

    compare(google, given(1, 2, side=16))


def compare(make: Callable[[], nn.Module], lanes: Lanes, within: float = 4e-6) -> None:
    found = sums(prepare(make(), lanes), lanes)
    reference = LaneByLane(make().double(), CrossEntropy(), 0, half=None)
    expected = sums(reference, Lanes(lanes.images.double(), lanes.labels, lanes.num_lanes))
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < within * other.norm().clamp_min(1e-30)


def test_a_border_around_one_pixel_with_our_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of that pixel has no border."""
    monkeypatch.setattr(at_once, "OWN_TYPES", (torch.float32,))

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 1, padding=1), nn.Tanh()
        return nn.Sequential(*layers, GlobalAverage(), nn.Linear(6, 10)).to(DEVICE)

    compare(make, given(1, 4, side=3))


@pytest.mark.parametrize("workers", [2, 4])
def test_all_lanes_at_once_are_lane_by_lane(workers: int) -> None:
    lanes, model = given(4, 3), branches()
    whole = prepare(model, lanes)
    (expected,) = whole.run(lanes, 3)
    network = whole.network(4)
    assert isinstance(network, CompiledNetwork)
    convs = [layer.conv for layer in network._module.modules() if isinstance(layer, LaneConv2d)]
    assert len(convs) == 8 and any(conv.forward_at_once and conv.gradient_at_once for conv in convs)
    tree = LaneTree()
    for own in (worker_lanes(4, workers, rank) for rank in range(workers)):
        for output in whole.run(lanes.range(own.start, len(own)), 3):
            tree.add([output.loss, *output.grads, *output.float_buffers], output.height)
    parts = [expected.loss, *expected.grads, *expected.float_buffers]
    assert all(torch.equal(a, b) for a, b in zip(tree.root()[1], parts, strict=True))


def test_a_convolution_that_differs_runs_lane_by_lane() -> None:
    """As stock kernels may, one that looks at the size of its batch."""
    conv = Conv((1, 1), (0, 0), (1, 1), 1, 2, 4)
    weight = torch.ones(3, 3, 2, 2, device=DEVICE)
    assert find_at_once(conv, weight, (3, 4, 4), torch.float32) == conv._replace(
        forward_at_once=True, gradient_at_once=True
    )
    own = F.conv2d

    def other(x: Tensor, *arguments: Any) -> Tensor:
        return own(x, *arguments) * (1 + 1e-6 * len(x))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "conv2d", other)
        found = find_at_once(conv, weight, (3, 4, 4), torch.float32)
    assert not found.forward_at_once and found.gradient_at_once
    x = torch.randn(8, 3, 4, 4, device=DEVICE)
    y = [lane_conv2d(x, weight, None, conv._replace(forward_at_once=way)) for way in (False, True)]
    assert torch.equal(*y)


def test_a_network_that_differs_at_once_runs_its_convolutions_lane_by_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where every convolution by itself gave the same bits; and what differs even then is refused."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), GlobalAverage(), nn.Linear(4, 10)
    model, train = nn.Sequential(*layers).to(DEVICE), Train(batch=8, lanes=4)
    expected = tensors_sha256(model_tensors(model))

    def at_once() -> set[tuple[bool, bool]]:
        program = find_compiled(model, (3, 6, 6), train)
        convs = prove_lanes(program, train, torch.device(DEVICE)).model.convs
        return {(conv.forward_at_once, conv.gradient_at_once) for conv in convs.values()}

    own, mean = custom_op.stock_conv, compiled_layer.pixel_mean

    def by_size(x: Tensor) -> float:
        return 1.0 if len(x) == 2 else 1 + 1e-6

    assert at_once() == {(True, True)}
    monkeypatch.setattr(custom_op, "stock_conv", lambda x, *given: own(x, *given) * by_size(x))
    assert at_once() == {(False, False)}
    monkeypatch.setattr(compiled_layer, "pixel_mean", lambda x: mean(x) * by_size(x))
    with pytest.raises(ModelError, match="other bits at once than one by one"):
        at_once()
    assert tensors_sha256(model_tensors(model)) == expected


@pytest.mark.skipif(DEVICE == "cuda", reason="there it is not traced only, but compiled")
@pytest.mark.parametrize("types", [(), (torch.float32,)])
def test_torch_can_compile_every_block(
    types: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without breaks, and tracing changes no bit; also with kernels of ours for the first convolution."""
    monkeypatch.setattr(at_once, "OWN_TYPES", types)
    lanes, model = given(2, 2), branches()
    plain = sums(prepare(model, lanes), lanes)
    own = CompiledNetwork._compile

    def trace(
        network: CompiledNetwork, forward: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return torch.compile(own(network, forward), fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(CompiledNetwork, "_compile", trace)
    assert all(torch.equal(a, b) for a, b in zip(sums(prepare(model, lanes), lanes), plain, strict=True))


@pytest.mark.parametrize("name", ["alexnet", "googlenet", "resnet18", "resnet50", "vgg11", "lenet5"])
def test_our_models_are_known(name: str) -> None:
    with torch.device("meta"):
        model = build(name, in_channels=3, num_classes=10, image_size=(64, 64))
    program = find_compiled(model, (3, 64, 64), Train(batch=256))
    assert program.model.classes == 10 and program.model.convs
    with pytest.raises(ModelError, match=r"train\.batch=32768 is too large"):
        find_compiled(model, (3, 64, 64), Train(batch=32768))


class OwnConv(nn.Conv2d):
    """Which does what it likes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean())


def shared() -> nn.Module:
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(layer, layer)


def hooked() -> nn.Module:
    layer = nn.Conv2d(3, 3, 1)
    layer.weight.register_hook(lambda grad: grad * 0)
    return layer


def buffered() -> nn.Module:
    layer = nn.Sequential(nn.Conv2d(3, 3, 1))
    layer.register_buffer("mean", torch.zeros(3, dtype=torch.int64))
    return layer


def locked() -> nn.Module:
    layer = nn.Sequential(nn.Conv2d(3, 3, 1))
    layer.lock = threading.Lock()
    return layer


class Resting(nn.Sequential):
    """Whose parts never train."""

    def train(self, mode: bool = True) -> Resting:
        super().train(False)
        return self


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (buffered(), "buffer 'mean' of '0' \\(Sequential\\) is not in fp32"),
        (locked(), "cannot be copied"),
        (Resting(nn.BatchNorm2d(3)), "does not train with it"),
        (OwnConv(3, 3, 1), "how '0' \\(OwnConv\\) sums or draws values \\(mean\\)"),
        (nn.Dropout2d(0.1), "how '0' \\(Dropout2d\\) sums or draws values"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "buffer|does not know how"),
        (nn.BatchNorm2d(3, affine=False), "a batch norm without parameters"),
        (nn.Conv2d(3, 3, 3, padding="same"), "is not by numbers and zeros"),
        (nn.Conv2d(3, 3, 1).double(), "a parameter of '0' \\(Conv2d\\) is not in fp32"),
        (shared(), "is used twice"),
        (hooked(), "has a hook"),
        (nn.Flatten(2), "does not give one row of logits a sample"),
        (nn.Flatten(0, 1), "is not given one row or image a sample"),
    ],
)
def test_what_it_cannot_run_says_why(layer: nn.Module, reason: str) -> None:
    last = nn.Identity() if isinstance(layer, nn.Flatten) else nn.Flatten()
    width = 144 if isinstance(layer, nn.Flatten) else 432
    if layer.__dict__.get("end_dim") == 1:
        layer = nn.Sequential(layer, nn.Flatten())
    model = nn.Sequential(layer, last, nn.Linear(width, 10))
    with pytest.raises(ModelError, match=reason):
        find_compiled(model, (3, 12, 12), Train(batch=8))


def lying(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator).to(DEVICE).contiguous(memory_format=torch.channels_last)


def image(*shape: int) -> Tensor:
    return lying(*shape).contiguous()


ROW5 = torch.ones(5, device=DEVICE)
ROW = [torch.ones(4, device=DEVICE) for _ in range(4)]
CONV = ([2, 2], [1, 1], [1, 1], 2, 2)
CLOSED = {
    "conv_forward": (lying(4, 4, 5, 5), lying(6, 2, 3, 3), *CONV, False),
    "stem_forward": (image(4, 9, 10, 4), image(3, 4, 6, 4), [2, 2], [1, 2]),
    "stem_weight_grad": (lying(4, 6, 4, 4), image(4, 9, 10, 4), lying(6, 3, 3, 4), [2, 2], [1, 2], 2, 4),
    "conv_data_grad": (lying(4, 6, 3, 3), lying(4, 4, 5, 5), lying(6, 2, 3, 3), *CONV, True),
    "conv_weight_grad": (lying(4, 6, 3, 3), lying(4, 4, 5, 5), lying(6, 2, 3, 3), *CONV),
    "product": (torch.ones(4, 3, device=DEVICE), torch.ones(5, 3, device=DEVICE), 2, True),
    "product_weight_grad": (torch.ones(4, 5, device=DEVICE), torch.ones(4, 3, device=DEVICE), 2),
    "lane_statistics": (lying(4, 4, 2, 3), *ROW, 2, 2, 1e-5, 0.1),
    "lane_norm_sums": (
        lying(4, 4, 2, 3),
        lying(4, 4, 2, 3),
        torch.ones(4, 2, 4, device=DEVICE),
        2,
        2,
        "silu",
    ),
    "lane_sums": (lying(4, 4, 2, 3), 2, 2),
    "depthwise": (lying(4, 4, 5, 6), lying(4, 1, 3, 3), [2, 1], [1, 0], [1, 2]),
    "depthwise_data_grad": (lying(4, 4, 3, 2), lying(4, 4, 5, 6), lying(4, 1, 3, 3), [2, 1], [1, 0], [1, 2]),
    "depthwise_filter_grad": (
        lying(4, 4, 3, 2),
        lying(4, 4, 5, 6),
        lying(4, 1, 3, 3),
        [2, 1],
        [1, 0],
        [1, 2],
        2,
        2,
    ),
    "row_statistics": (torch.ones(4, 3, 5, device=DEVICE), 1e-6),
    "row_sums": (*[torch.ones(4, 3, 5, device=DEVICE)] * 2, torch.ones(2, 4, 3, device=DEVICE), ROW5, 2, 2),
    "product_sum": (lying(4, 4, 2, 3), lying(4, 4, 2, 3), 2, 2),
    "lane_sum": (torch.ones(2, 3, 4, device=DEVICE),),
}


@pytest.mark.parametrize("name", CLOSED)
def test_the_compiler_knows_the_shapes_of_a_closed_operation(name: str) -> None:
    operation = getattr(torch.ops.lockstep, name).default
    torch.library.opcheck(operation, CLOSED[name], test_utils=("test_schema", "test_faketensor"))
