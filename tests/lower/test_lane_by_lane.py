"""Lanes of any module: what a lane gives depends on its samples and its keys, and nothing is left behind."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.dropout import dropout
from lockstep.lower.choose import lower_for_host
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput

SEED = 11


def lanes(num: int = 4, per_lane: int = 3) -> Lanes:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num * per_lane, 2, 4, 4, generator=generator)
    return Lanes(images, torch.arange(num * per_lane) % 5, num)


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 6), *middle, nn.Linear(6, 5))


def lowered(model: nn.Module, half: torch.dtype | None = None, seed: int = SEED) -> LaneByLane:
    return lower_for_host(model, F.cross_entropy, seed=seed, half=half)


def outputs(model: nn.Module, step: int = 0, batch: Lanes | None = None, **settings) -> list[LaneOutput]:
    return list(lowered(model, **settings).run(batch or lanes(), step))


def same(a: list[LaneOutput], b: list[LaneOutput]) -> bool:
    return all(
        torch.equal(x.loss, y.loss) and all(map(torch.equal, x.grads, y.grads))
        for x, y in zip(a, b, strict=True)
    )


def test_a_lane_equals_the_module_alone() -> None:
    model = network(nn.ReLU())
    other = copy.deepcopy(model)
    for lane, output in enumerate(outputs(model)):
        images, labels = lanes().lane(lane)
        logits = other(images.clone())
        loss = F.cross_entropy(logits, labels)
        grads = torch.autograd.grad(loss, list(other.parameters()))
        assert torch.equal(output.loss, loss.detach())
        assert torch.equal(output.logits, logits.detach())
        assert all(map(torch.equal, output.grads, grads))


def test_a_lane_does_not_depend_on_the_lanes_before_it() -> None:
    batch = lanes()
    changed = batch.images.clone()
    changed[:3] *= 7
    first, second = outputs(network()), outputs(network(), batch=Lanes(changed, batch.labels, 4))
    assert not same(first[:1], second[:1])
    assert same(first[1:], second[1:])


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.RReLU(), nn.AlphaDropout(0.5)])
def test_the_global_generator_does_not_matter(drop: nn.Module) -> None:
    torch.manual_seed(5)
    first = outputs(network(drop))
    torch.manual_seed(6)
    torch.rand(100)
    assert same(outputs(network(drop)), first)


def test_the_dropout_mask_is_that_of_seed_step_lane_and_name() -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"drop": nn.Dropout(0.4), "again": nn.Dropout(0.4)})
            self.head = nn.Linear(32, 5)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            ones = torch.ones(3, 8)
            self.seen += [self.inner["drop"](ones), self.inner["again"](ones)]
            return self.head(x.flatten(1))

    model = Probe()
    outputs(model, step=7)
    expected = [
        dropout(torch.ones(3, 8), 0.4, random.key("dropout", SEED, 7, lane, name))
        for lane in range(4)
        for name in ("inner.drop", "inner.again")
    ]
    assert all(map(torch.equal, model.seen, expected))
    assert len({tuple(mask.flatten().tolist()) for mask in model.seen}) == 8


@pytest.mark.parametrize("drop", [nn.Dropout, nn.Dropout1d])
def test_step_and_seed_change_the_dropout(drop) -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.head = drop(0.5), nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(x.flatten(2)).flatten(1))

    torch.manual_seed(0)
    model = Channels()
    first = outputs(model)
    assert same(outputs(model), first)
    assert not same(outputs(model, step=1), first)
    assert not same(outputs(model, seed=SEED + 1), first)


def test_dropout_is_off_in_evaluation() -> None:
    model = network(nn.Dropout(0.5))
    run = lowered(model)
    list(run.run(lanes(), 0))
    model.eval()
    x = torch.rand(2, 2, 4, 4)
    assert torch.equal(model(x), model(x))
    assert torch.equal(model[2](x), x)


def test_release_gives_the_module_its_own_forward_back() -> None:
    model = network(nn.Dropout(0.5), nn.Dropout1d(0.5))
    before = [dict(vars(module)) for module in model]
    run = lowered(model)
    assert "forward" in vars(model[2])
    run.release()
    assert [dict(vars(module)).keys() for module in model] == [old.keys() for old in before]
    torch.manual_seed(0)
    dropped = model[2](torch.ones(50))
    torch.manual_seed(0)
    assert torch.equal(dropped, F.dropout(torch.ones(50), 0.5))


def test_buffers_are_those_of_the_start_in_every_lane_and_afterwards() -> None:
    model = network(nn.BatchNorm1d(6))
    norm = model[2]
    norm.running_mean.uniform_()
    before = {name: b.clone() for name, b in model.named_buffers()}
    seen = []
    for output in lowered(model).run(lanes(), 0):
        seen.append(output)
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert all(int(output.int_buffers[0]) == 1 for output in seen)
    for lane, output in enumerate(seen):
        alone = copy.deepcopy(model).train()
        alone(lanes().lane(lane)[0].clone())
        assert all(map(torch.equal, output.float_buffers, [alone[2].running_mean, alone[2].running_var]))


def test_buffers_that_a_module_replaces_are_per_lane_too() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 5)
            self.register_buffer("average", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.average = self.average + x.mean().detach()
            return self.head(x.flatten(1))

    model = Replacing()
    for lane, output in enumerate(outputs(model)):
        assert torch.equal(output.float_buffers[0], lanes().lane(lane)[0].clone().mean())
    assert float(model.average) == 0.0


class Extra(nn.Module):
    """A head and further parameters, used as the test says."""

    def __init__(self, use) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.head = nn.Linear(32, 5)
        self.a, self.b = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(5))
        self._use = use

    def forward(self, x: Tensor) -> Tensor:
        return self._use(self, self.head(x.flatten(1)))


@pytest.mark.parametrize(
    "use",
    [
        lambda m, out: out + (m.a + m.b),  # one gradient for two parameters
        lambda m, out: out * (m.a.sum() + m.b.sum()),  # one element expanded to a whole gradient
        lambda m, out: out * torch.cat([m.a, m.b])[:5],  # gradients that are views of one tensor
    ],
)
def test_gradients_are_tensors_of_their_own(use) -> None:
    for output in outputs(Extra(use)):
        expected = [grad.clone() for grad in output.grads]
        for index, grad in enumerate(output.grads):
            grad.add_(1.0)
            expected[index] += 1.0
            assert all(map(torch.equal, output.grads, expected))


def test_an_unused_parameter_has_a_zero_gradient() -> None:
    output = outputs(Extra(lambda m, out: out * m.a))[0]
    assert output.grads[0].abs().sum() > 0  # a
    assert torch.equal(output.grads[1], torch.zeros(5))  # b


def test_a_frozen_parameter_has_no_gradient() -> None:
    model = network()
    model[1].weight.requires_grad_(False)
    run = lowered(model)
    assert list(run.params) == ["1.bias", "2.weight", "2.bias"]
    assert [g.shape for g in next(run.run(lanes(), 0)).grads] == [p.shape for p in run.params.values()]


def test_auxiliary_heads_count_by_the_models_weight() -> None:
    class Heads(nn.Module):
        aux_weight = 0.25

        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = nn.Linear(32, 5), nn.Linear(32, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.main(x.flatten(1)), self.side(x.flatten(1))

    model = Heads()
    images, labels = lanes().lane(0)
    main, side = model(images)
    expected = F.cross_entropy(main, labels) + 0.25 * F.cross_entropy(side, labels)
    output = outputs(model)[0]
    assert torch.equal(output.loss, expected.detach())
    assert torch.equal(output.logits, main.detach())


def test_bf16_computes_in_bf16_and_keeps_fp32_gradients() -> None:
    seen = []
    model = network()
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    bf16 = outputs(model, half=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    assert {g.dtype for g in bf16[0].grads} == {torch.float32}
    fp32 = outputs(model)
    assert not same(bf16, fp32)
    assert abs(float(bf16[0].loss - fp32[0].loss)) < 0.05


def test_the_training_mode_is_on_whatever_it_was() -> None:
    model = network(nn.Dropout(0.5)).eval()
    assert same(outputs(model), outputs(network(nn.Dropout(0.5)).train()))
