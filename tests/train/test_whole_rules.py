"""Rules that look at whole parameters, against formulas in float64, and in parts against the whole."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.shard.shard_block import CHUNK, ShardBlock
from lockstep.errors import SpecError
from lockstep.runs.train_state import TrainState, init_memory
from lockstep.spec import Optimizer, Run, Train
from lockstep.spec.plan import read_plan
from lockstep.spec.plan_check import check_plans
from lockstep.train.optimizer import update_params
from lockstep.train.update.state_update import update_state
from lockstep.train.update.trust_ratio import trust_ratios

STEPS, LR = 5, 0.03
SHAPES = [(7, 5), (13,), (2, 3, 3, 3), (4,), (300, 250)]  # the last has two chunks
DECAYED = [True, False, True, False, True]
RULES = {
    "lars": Optimizer("lars", options={"momentum": 0.8, "trust": 0.01, "eps": 1e-3}),
    "lamb": Optimizer("lamb", options={"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}),
}


def randoms(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]


def lars(p: Tensor, grads: list[Tensor], decay: float, has_ratio: bool) -> Tensor:
    """You et al. 2017, as it is in timm and apex."""
    velocity = torch.zeros_like(p)
    for g in grads:
        scaled = g
        if has_ratio:
            norm, by = p.norm(), g.norm()
            scaled = (g + decay * p) * (0.01 * norm / (by + decay * norm + 1e-3))
        velocity = 0.8 * velocity + scaled
        p = p - LR * velocity
    return p


def lamb(p: Tensor, grads: list[Tensor], decay: float, has_ratio: bool) -> Tensor:
    """You et al. 2019, with the bias correction of Adam."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        u = m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        if has_ratio:
            u = u + decay * p
            u = u * (p.norm() / u.norm())
        p = p - LR * u
    return p


def train(optimizer: Optimizer, params: list[Tensor], grads: list[list[Tensor]]) -> dict[str, list[Tensor]]:
    memory = init_memory(optimizer, params)
    for step, row in enumerate(grads):
        update_params(optimizer, LR, step, params, [grad.clone() for grad in row], memory, DECAYED)
    return memory


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "formula"), [("lars", lars), ("lamb", lamb)])
def test_it_is_the_published_rule(name, formula, decay) -> None:
    ours, grads = randoms(0), [randoms(step + 1) for step in range(STEPS)]
    rows = zip(*grads, strict=True)
    expected = [formula(p, g, decay, has) for p, g, has in zip(ours, rows, DECAYED, strict=True)]
    train(replace(RULES[name], weight_decay=decay), ours, grads)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)  # norms are of fp32


@pytest.mark.parametrize("name", RULES)
def test_a_norm_of_zero_gives_a_ratio_of_one(name) -> None:
    zeros, values = torch.zeros(3, 2), torch.randn(3, 2)
    found = trust_ratios(RULES[name], [zeros, values, zeros, values], [values, zeros, zeros, 3 * values])
    assert found[:3].tolist() == [1.0] * 3 and 0.0 < found[3] < 1.0


@pytest.mark.parametrize("name", RULES)
def test_a_parameters_update_knows_neither_the_others_nor_its_layout(name) -> None:
    optimizer = replace(RULES[name], weight_decay=0.1)
    whole, grads = randoms(0, torch.float32), [randoms(step + 1, torch.float32) for step in range(STEPS)]
    alone, flat = whole[2].to(memory_format=torch.channels_last), whole[4].flatten().clone()
    train(optimizer, whole, grads)
    for own, place in ((alone, 2), (flat, 4)):
        memory = init_memory(optimizer, [own])
        for step, row in enumerate(grads):
            update_params(optimizer, LR, step, [own], [row[place].reshape(own.shape).clone()], memory)
        assert torch.equal(own, whole[place].view(own.shape))


@pytest.mark.parametrize("name", RULES)
def test_norms_and_biases_have_no_ratio_and_no_decay(name) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    plain = {"lars": "momentum", "lamb": "adam"}[name]
    options = {key: value for key, value in RULES[name].options.items() if key != "trust"}
    options.pop("eps") if name == "lars" else None
    states = [
        TrainState.begin(copy.deepcopy(model), rule, 0.0)
        for rule in (replace(RULES[name], weight_decay=0.1), Optimizer(plain, options=options))
    ]
    grads = {key: torch.randn_like(p) for key, p in model.named_parameters()}
    for state in states:
        update_state(state, 0, [LR], {key: grad.clone() for key, grad in grads.items()})
    ours, others = (state.trained() for state in states)
    assert [key for key in ours if torch.equal(ours[key], others[key])] == [
        "0.bias",
        "1.weight",
        "1.bias",
        "3.bias",
    ]


def test_shares_of_whole_parameters_cut_none() -> None:
    shapes = tuple(torch.Size(shape) for shape in [(3 * CHUNK,), (7,), (2, CHUNK), (5, 5)])
    for shares in range(2, 9):
        cut, whole = (ShardBlock(shapes, shares, whole=is_whole) for is_whole in (False, True))
        assert shares == 2 or any(place not in cut.starts for place in cut.bounds)
        assert all(place in whole.starts for place in whole.bounds)
        held = sorted(piece.index for number in range(shares) for piece in whole.pieces(number))
        assert held == [0, 1, 2, 3]


@pytest.mark.parametrize("name", RULES)
def test_layers_by_their_rows_are_refused(name) -> None:
    run = Run(optimizer=Optimizer(name), train=Train(slices=2))
    plan = read_plan("data=2,layers=hidden*")
    with pytest.raises(SpecError, match=rf"layers=hidden\*: optimizer.name={name} looks at whole parameters"):
        check_plans([plan], run, 2)
