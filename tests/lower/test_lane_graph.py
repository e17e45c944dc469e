"""Models whose forward is their own: they are traced, and all lanes at once have the bits of one by one."""

from __future__ import annotations

import pytest
import torch
from images import DEVICE
from lower.mobile_nets import DropPath, Inverted, Next, mobile
from lower.test_compiled import as_training, compare, given, prepare, sums  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ModelError
from lockstep.kernels.loss import CrossEntropy
from lockstep.lower.compiled.compiled_layer import LaneNorm
from lockstep.lower.compiled.compiled_network import CompiledNetwork
from lockstep.lower.compiled.compiled_program import find_compiled, prove_lanes
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.model_tracer import ModelTracer
from lockstep.spec import Train


def frozen() -> nn.Module:
    model = mobile()
    model.stem.requires_grad_(False)
    model.norm.requires_grad_(False)
    return model


@pytest.mark.parametrize(("make", "lanes"), [(mobile, 2), (frozen, 1)])
def test_it_is_the_model_itself(make, lanes) -> None:
    """Against stock kernels in float64; stochastic depth drops what it drops through the host."""
    compare(lambda: make().to(DEVICE), given(lanes, 4), within=2e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="there it is not traced only, but compiled")
def test_torch_can_compile_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without breaks, and tracing changes no bit."""
    lanes, own = given(1, 4), CompiledNetwork._compile
    model = with_layer(nn.Sequential(Inverted(3, 1, nn.SiLU), Next(3, True)))
    plain = sums(prepare(model, lanes), lanes)

    def trace(network: CompiledNetwork, forward):
        return torch.compile(own(network, forward), fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(CompiledNetwork, "_compile", trace)
    torch.compiler.reset()  # other tests of this process have compiled blocks, of which few are remembered
    assert all(torch.equal(a, b) for a, b in zip(sums(prepare(model, lanes), lanes), plain, strict=True))


def test_the_whole_network_is_proven_before_the_first_step() -> None:
    model, train = mobile().to(DEVICE), Train(batch=4, lanes=2)
    program = prove_lanes(find_compiled(model, (3, 8, 8), train), train, torch.device(DEVICE))
    network = CompiledNetwork(program.model, 2, train, torch.device(DEVICE), None)
    acts = [
        layer.act for graph in network._graphs for layer in graph.modules() if isinstance(layer, LaneNorm)
    ]
    assert acts.count("silu") == 3 and acts.count("hardswish") == 2 and acts.count("") == 2
    assert len(program.drops) == 2


class Rolled(nn.Module):
    """Gives every sample what the one before it had."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0)


class Centred(nn.Module):
    """Subtracts a mean over samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Noisy(nn.Module):
    """Draws by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Gated(nn.Module):
    """Spreads a value for each pixel over its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class Twice(nn.Module):
    """Uses a layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Asking(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.mean((2, 3)))
        return y if y.sum() > 0 else -y


def with_layer(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 3, 1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10)
    ).to(DEVICE)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Centred(), r"how '1' \(Centred\) sums or draws values \(mean\)"),
        (Noisy(), r"how '1' \(Noisy\) sums or draws values \(.*(dropout|bernoulli)"),
        (Gated(), r"how '1' \(Gated\) sums or draws values \(sum\)"),
        (Twice(), r"its parameter '1.layer.weight' is used twice"),
        (nn.InstanceNorm2d(3), r"how '1' \(InstanceNorm2d\) sums or draws"),
        (nn.Dropout2d(0.5), r"how '1' \(Dropout2d\) sums or draws"),
    ],
)
def test_what_it_cannot_run_is_named(layer: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        find_compiled(with_layer(layer), (3, 6, 6), Train(batch=8, lanes=4))
    find_compiled(with_layer(layer), (3, 6, 6), Train(batch=8, lanes=1))


def test_stochastic_depth_is_keyed_by_lane_and_by_name_and_stays_one_call() -> None:
    model = nn.Sequential(DropPath(0.5), DropPath(0.5))
    way = LaneByLane(model, CrossEntropy(), 0, half=None)
    x = torch.ones(64, 3)
    first, again, other = model[0](x), model[0](x), model[1](x)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 2.0} and torch.equal(first[:, 0], first[:, 2])
    way._lane = 1
    assert not torch.equal(model[0](x), first)
    names = [str(node.target) for node in ModelTracer().find_calls(model).nodes if node.op == "call_module"]
    assert names == ["0", "1"]  # else a trace would keep the mask of one lane


def test_what_decides_by_a_value_is_not_traced() -> None:
    with pytest.raises(ModelError, match=r"'the model' \(Asking\) cannot be traced: symbolically traced"):
        find_compiled(Asking().to(DEVICE), (3, 6, 6), Train(batch=8))


def test_what_gives_a_lane_something_of_another_is_found_by_its_bits() -> None:
    model, train = with_layer(Rolled()), Train(batch=8, lanes=4)
    program = find_compiled(model, (3, 6, 6), train)
    with pytest.raises(ModelError, match="other bits at once than one by one"):
        prove_lanes(program, train, torch.device(DEVICE))
