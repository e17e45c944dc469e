"""A step equals the same computed by hand, and one that fails leaves everything as it was."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.loader import Lanes
from lockstep.errors import GroupLost, LockstepError, NumericsError
from lockstep.kernels.numerics import half_type
from lockstep.lanes.step_reduction import read_finite
from lockstep.lower.choose import lower_for_host
from lockstep.models.tensors import tensors_sha256
from lockstep.runs.state_parts import StateParts
from lockstep.runs.train_state import TrainState, init_memory
from lockstep.spec import Optimizer, Run, Schedule, Train
from lockstep.train import step as step_module
from lockstep.train.optimizer import update_params
from lockstep.train.result import StepResult
from lockstep.train.step import Step

CONSTANT = Schedule("constant")
PER_LANE, STEPS_PER_EPOCH = 4, 10


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 5 * 5, 3),
    )


def batch(num_lanes: int, seed: int = 0) -> Lanes:
    generator = torch.Generator().manual_seed(seed)
    size = num_lanes * PER_LANE
    labels = torch.randint(0, 3, (size,), generator=generator)
    return Lanes(torch.randn(size, 2, 5, 5, generator=generator), labels, num_lanes)


class Training:
    """A model with its state, ready to step."""

    def __init__(
        self, num_lanes: int = 4, model: nn.Module | None = None, rule: Optimizer | None = None, **train
    ):
        self.model = model or network()
        self.run = Run(
            seed=5,
            train=Train(batch=num_lanes * PER_LANE, lanes=num_lanes, **train),
            optimizer=rule or Optimizer("momentum", lr=0.1),
            schedule=CONSTANT,
        )
        self.state = TrainState.begin(self.model, self.run.optimizer, self.run.train.ema)
        half = half_type(self.run.train.precision)
        self.lowered = lower_for_host(self.model, F.cross_entropy, seed=5, half=half)
        self.step = Step(self.run, self.state, self.lowered, STEPS_PER_EPOCH)

    def sha(self) -> str:
        return tensors_sha256(dict(self.state.tensors()))


def tree(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return tree(values[:half]) + tree(values[half:])


def step_by_hand(training: Training, lanes: Lanes) -> tuple[StepResult, dict[str, Tensor]]:
    """Each lane on a copy of the model with plain autograd; then the tree, written out."""
    losses, correct, grads, buffers = [], 0, [], []
    for lane in range(lanes.num_lanes):
        model = copy.deepcopy(training.model)
        lowered = lower_for_host(model, F.cross_entropy, seed=5, half=None)
        lowered._step, lowered._lane = training.state.step, lane  # keys of the dropout masks
        images, labels = lanes.lane(lane)
        logits = model.train()(images.clone())
        loss = F.cross_entropy(logits, labels)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
        losses.append(loss.detach())
        correct += int((logits.argmax(1) == labels).sum())
        buffers.append({k: b.clone() for k, b in model.named_buffers() if b.is_floating_point()})
    share = 1.0 / lanes.num_lanes
    params = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    mean = [tree(list(column)) * share for column in zip(*grads, strict=True)]
    rule = training.run.optimizer
    update_params(rule, rule.lr, 0, list(params.values()), mean, init_memory(rule, list(params.values())))
    expected = params | {name: tree([row[name] for row in buffers]) * share for name in buffers[0]}
    expected["1.num_batches_tracked"] = torch.tensor(1)
    return StepResult(float(tree(losses) * share), correct, rule.lr), expected


@pytest.mark.parametrize("num_lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_a_step_equals_the_step_by_hand_bit_for_bit(num_lanes: int, rule: str) -> None:
    training = Training(num_lanes, rule=Optimizer(rule, lr=0.1, weight_decay=0.01))
    result, expected = step_by_hand(training, batch(num_lanes))
    assert training.step(batch(num_lanes)) == result
    state = training.model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


def test_lanes_are_part_of_the_result() -> None:
    """Teeth: the same samples summed over another tree give other bits."""
    plain = nn.Sequential(nn.Flatten(), nn.Linear(50, 3))
    one, four = Training(1, copy.deepcopy(plain)), Training(4, copy.deepcopy(plain))
    lanes = batch(4)
    four.step(lanes)
    one.step(Lanes(lanes.images, lanes.labels, 1))
    assert one.sha() != four.sha()
    torch.testing.assert_close(one.model[1].weight, four.model[1].weight)


def test_a_step_moves_the_cursor() -> None:
    training = Training()
    training.step(batch(4))
    training.step(batch(4, seed=1))
    assert (training.state.step, training.state.step_in_epoch, training.state.epoch) == (2, 2, 0)


def test_steps_do_not_depend_on_the_global_generator() -> None:
    shas = []
    for seed in (1, 2):
        training = Training()
        for step in range(3):
            torch.manual_seed(seed + step)
            training.step(batch(4, step))
        shas.append(training.sha())
    assert shas[0] == shas[1]


def test_the_schedule_gives_the_rate() -> None:
    training = Training()
    training.step._run = Run(train=training.run.train, schedule=Schedule("constant", warmup_epochs=1))
    assert [training.step(batch(4)).lr for _ in range(2)] == [0.05 * 1 / 10, 0.05 * 2 / 10]


def test_a_frozen_parameter_stays() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    training = Training(model=model, rule=Optimizer("adamw", weight_decay=0.1))
    training.step(batch(4))
    assert torch.equal(model[0].weight, before)
    assert len(training.state.memory["mean"]) == len(list(model.parameters())) - 1


class Shared(nn.Module):
    """Two parameters that autograd gives one gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.head = nn.Linear(50, 3)
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) + (self.a + self.b)


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_parameters_with_one_gradient_are_updated_once_each(num_lanes: int) -> None:
    model = Shared()
    bias = model.head.bias.detach().clone()
    Training(num_lanes, model, Optimizer("sgd", lr=0.5, weight_decay=0.0)).step(batch(num_lanes))
    assert torch.equal(model.a, model.b)
    torch.testing.assert_close(model.a, model.head.bias - bias)


def test_integer_buffers_must_agree_between_lanes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(50, 3)
            self.register_buffer("positive", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.positive += (x > 0).sum()
            return self.head(x.flatten(1))

    training = Training(model=Counting())
    before = training.sha()
    with pytest.raises(LockstepError, match="buffer 'positive' is an integer and differs between lanes"):
        training.step(batch(4))
    assert training.sha() == before


def test_a_bad_input_stops_the_step_and_changes_nothing() -> None:
    training = Training(ema=0.9)
    training.step(batch(4))
    before = training.sha()
    lanes = batch(4, 1)
    lanes.images[2 * PER_LANE, 0, 0, 0] = float("nan")
    with pytest.raises(NumericsError, match=r"step 1: not finite: the images of lane 2"):
        training.step(lanes)
    assert training.sha() == before
    assert training.state.step == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_parameter_is_named_and_nothing_changes(value: float) -> None:
    training = Training()
    with torch.no_grad():
        training.model[5].weight[1, 2] = value
    before = training.sha()
    with pytest.raises(NumericsError, match=r"step 0: not finite: parameter '5\.weight'"):
        training.step(batch(4))
    assert training.sha() == before


def test_a_bad_gradient_behind_a_finite_loss_is_named() -> None:
    class Root(nn.Module):
        """The root of zero: a finite value whose slope is not."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.zero = nn.Linear(50, 3), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1)) + self.zero.sqrt()

    training = Training(model=Root())
    before = training.sha()
    with pytest.raises(NumericsError, match="gradient of 'zero' in lane 0"):
        training.step(batch(4))
    assert training.sha() == before


def test_a_step_that_failed_can_be_run_again() -> None:
    training, other = Training(), Training()
    bad = batch(4)
    bad.images[0] = float("inf")
    with pytest.raises(NumericsError):
        training.step(bad)
    assert training.step(batch(4)) == other.step(batch(4))
    assert training.sha() == other.sha()


def test_an_error_inside_the_model_changes_nothing() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head, self.calls = nn.BatchNorm2d(2), nn.Linear(50, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("out of memory, say")
            return self.head(x.flatten(1))

    training = Training(model=Failing())
    before = training.sha()
    with pytest.raises(RuntimeError, match="out of memory, say"):
        training.step(batch(4))
    assert training.sha() == before


def test_clipping_bounds_the_change() -> None:
    training = Training(rule=Optimizer("sgd", lr=1.0), clip=0.01)
    before = [p.detach().clone() for p in training.model.parameters()]
    training.step(batch(4))
    pairs = zip(training.model.parameters(), before, strict=True)
    change = torch.cat([(p.detach() - b).double().flatten() for p, b in pairs]).norm()
    assert abs(float(change) - 0.01) < 1e-5


def test_averaged_weights_follow_with_a_shorter_memory_at_first() -> None:
    training = Training(ema=0.9)
    expected = {k: v.clone() for k, v in training.state.ema.items()}
    for step in range(3):
        training.step(batch(4, step))
        decay = min(0.9, (1 + step) / (10 + step))
        for name, tensor in training.model.state_dict().items():
            if tensor.is_floating_point():
                expected[name] = expected[name] * decay + tensor * (1.0 - decay)
    assert training.state.ema.keys() == expected.keys()
    for name, tensor in training.state.ema.items():
        torch.testing.assert_close(tensor, expected[name])


def test_without_averaging_nothing_is_kept() -> None:
    assert Training().state.ema == {}


def test_bf16_steps_are_repeatable_and_keep_fp32_weights() -> None:
    shas = []
    for _ in range(2):
        training = Training(precision="bf16")
        for step in range(2):
            training.step(batch(4, step))
        assert {p.dtype for p in training.model.parameters()} == {torch.float32}
        shas.append(training.sha())
    other = Training()
    for step in range(2):
        other.step(batch(4, step))
    assert shas[0] == shas[1] != other.sha()


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_group_lost_while_moves_are_exchanged_costs_no_bit(in_parts, monkeypatch) -> None:
    def lose(*given):
        raise GroupLost("a worker died")

    whole, torn = (Training(rule=Optimizer("muon"), clip=0.1) for _ in range(2))
    torn.state.parts = StateParts() if in_parts else None
    before = torn.sha()
    whole.step(batch(4))
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "exchange_moves", lose)
        with pytest.raises(GroupLost):
            torn.step(batch(4))
    assert torn.sha() == before
    if in_parts:  # another worker has committed it
        torn.state.finish(torch.tensor(1.0))
    else:
        assert torn.state.finish is None
        torn.step(batch(4))
    assert torn.sha() == whole.sha()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_finite_may_have_a_sum_that_is_not(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for values, is_finite in (
        ([most, most], True),
        ([-most, -most, 1.0], True),
        ([torch.inf, -torch.inf], False),
        ([most, most, -torch.inf], False),
        ([1.0, torch.nan], False),
        ([], True),
    ):
        tensor = torch.tensor(values, dtype=dtype)
        assert read_finite([torch.ones(())], [tensor]) == ([1.0], is_finite, True)
        assert read_finite([torch.ones(())], [], [torch.ones(3), tensor]) == ([1.0], True, is_finite)
