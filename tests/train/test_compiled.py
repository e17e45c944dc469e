"""Stock kernels on the device: layers that know lanes, all of them at once or one by one, with one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from images import DEVICE
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.errors import ModelError
from lockstep.kernels.average import GlobalAverage
from lockstep.kernels.device.stock import StockNetwork
from lockstep.kernels.device.table import Table
from lockstep.kernels.lrn import LRN
from lockstep.models import build
from lockstep.models.googlenet import Inception
from lockstep.spec import Train
from lockstep.train.compiled import Compiled, find_compiled, is_known
from lockstep.train.device_lanes import DeviceLanes
from lockstep.train.lane import LaneByLane
from lockstep.train.loss import CrossEntropy
from lockstep.train.lower import DevicePlan


def branches() -> nn.Sequential:
    """Grouped and strided convolutions, response normalization, branches, overlapping pooling, dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True), LRN(3),
        nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True), Inception((8, 4, 4, 4, 2, 4, 4)), nn.AvgPool2d(2),
        GlobalAverage(), nn.Dropout(0.4), nn.Linear(16, 10),
    ).to(DEVICE)  # fmt: skip


class TwoHeads(nn.Module):
    """With an auxiliary head, and a forward of its own."""

    aux_weight = 0.3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.main = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 10))
        self.aux = nn.Sequential(nn.Flatten(), nn.Linear(432, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.aux(x)


def given(lanes: int, size: int) -> Lanes:
    images = torch.randn(lanes * size, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    return Lanes(images.to(DEVICE), torch.arange(lanes * size, device=DEVICE) % 10, lanes)


def prepare(model: nn.Module, lanes: Lanes, at_once: bool | None = None, batch: int = 0) -> DeviceLanes:
    form = find_compiled(model, (3, 12, 12))
    if at_once is not None:
        form = replace(form, model=replace(form.model, at_once=at_once))
    train = Train(batch=batch or len(lanes.labels), lanes=lanes.num_lanes)
    return DeviceLanes(model, DevicePlan(form, Table(), train, torch.device(DEVICE)), 0)


@pytest.fixture(autouse=True)
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tf32 on a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def sums(way: LaneByLane, lanes: Lanes) -> list[Tensor]:
    outputs = list(way.run(lanes, 3))
    each = ([o.loss, *o.grads, *o.float_buffers] for o in outputs)
    return [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]


@pytest.mark.parametrize("make", [branches, TwoHeads])
def test_it_is_the_model_itself(make: Callable[[], nn.Module]) -> None:
    """Against stock kernels in float64; dropout has the masks of the step through the host."""
    lanes = given(4, 3)
    model, exact = make().to(DEVICE), make().to(DEVICE).double()
    found = sums(prepare(model, lanes), lanes)
    reference = LaneByLane(exact, CrossEntropy(), 0, bf16=False)
    expected = sums(reference, Lanes(lanes.images.double(), lanes.labels, lanes.num_lanes))
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 2e-6 * other.norm().clamp_min(1e-30)


def test_all_lanes_at_once_are_lane_by_lane() -> None:
    lanes, model = given(4, 3), branches()
    together, apart = prepare(model, lanes), prepare(model, lanes, at_once=False)
    assert all(torch.equal(a, b) for a, b in zip(sums(together, lanes), sums(apart, lanes), strict=True))
    network = together.network(4)
    assert isinstance(network, StockNetwork) and network.facts().startswith("all lanes at once")
    other = apart.network(4)
    assert isinstance(other, StockNetwork) and other.facts() == "lane by lane"


def test_torch_can_compile_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without breaks, and tracing changes no bit."""
    lanes, model = given(2, 2), branches()
    plain = sums(prepare(model, lanes), lanes)
    own = StockNetwork._compile

    def trace(network: StockNetwork) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return torch.compile(own(network), fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(StockNetwork, "_compile", trace)
    assert all(torch.equal(a, b) for a, b in zip(sums(prepare(model, lanes), lanes), plain, strict=True))


@pytest.mark.parametrize("name", ["alexnet", "googlenet", "resnet18", "resnet50", "vgg11", "lenet5"])
def test_our_models_run_all_lanes_at_once(name: str) -> None:
    with torch.device("meta"):
        model = build(name, in_channels=3, num_classes=10, image_size=(64, 64))
    assert isinstance(find_compiled(model, (3, 64, 64)), Compiled) and is_known(model)


def shared() -> nn.Module:
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(layer, layer, nn.Flatten(), nn.Linear(432, 10))


@pytest.mark.parametrize("make", [TwoHeads, shared])
def test_what_is_not_known_runs_lane_by_lane(make: Callable[[], nn.Module]) -> None:
    assert not is_known(make())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm2d(3, affine=False), "a batch norm without parameters"),
        (nn.Dropout2d(0.1), "is no nn.Dropout"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "buffers that are no running statistics"),
        (nn.Conv2d(3, 3, 3, padding="same"), "is not by numbers and zeros"),
        (nn.Conv2d(3, 3, 1).requires_grad_(False), "is frozen"),
    ],
)
def test_what_it_cannot_run_says_why(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(432, 10))
    with pytest.raises(ModelError, match=reason):
        find_compiled(model, (3, 12, 12))
