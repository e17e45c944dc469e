"""model.freeze and optimizer.rates: one hash at every number of workers and under every plan, and after a
resume; what is frozen keeps every bit, its batch norms too; names that do not exist are refused.

At 40 pixels a weight of LeNet-5 has more than 2¹⁶ values, so that it is cut into shares.
"""

import pytest
import torch
from plan_runs import HASHES, hashes, run
from small import small_run, train

from lockstep.errors import Paused, SpecError
from lockstep.models import build_model
from lockstep.models.tensors import model_tensors
from lockstep.runs.train_state import TrainState
from lockstep.runs.trained_run import open_trained
from lockstep.spec import Optimizer
from lockstep.train.update.state_update import update_state

KEYS = (
    *("data.size=40", "data.num_train=64", "data.num_test=16", "train.lanes=4", "train.slices=2"),
    *("optimizer.weight_decay=0.1", "train.epochs=1", "train.clip=1.0", "train.ema=0.9"),
    *("model.freeze=block1", "optimizer.rates=head:10,block2:0.1,*.bias:2"),
)
RESNET = (
    *("model.name=resnet18", "data.size=8", "data.num_train=16", "data.num_test=8", "train.batch=8"),
    *("train.lanes=4", "train.epochs=1", "model.freeze=stem,layer1*,layer2*,layer3*,layer4_0"),
    "optimizer.rates=layer4_1.main.0:0.1,head:3",
)
LOCAL = (*KEYS[1:3], "data.size=16", *KEYS[3:], "train.local_steps=2", "train.slices=1")
ROUNDED = (*KEYS[1:3], "data.size=16", *KEYS[3:], "train.compress=top:0.05", "optimizer.name=muon")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        ("data=2,shard=optimizer", KEYS),
        ("data=3,shard=parameters", KEYS),
        ("pipeline=2", KEYS),
        ("data=2,layers=hidden*", KEYS),
        ("data=3", RESNET),
        ("data=3", LOCAL),
        ("data=2", ROUNDED),
    ],
    ids=["optimizer", "parameters", "pipeline", "layers", "norms", "local steps", "compressed"],
)
def test_one_hash(plan, keys, by_one_worker, tmp_path):
    alone = by_one_worker(*keys)
    run(tmp_path, "--plan", plan, overrides=keys)
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}


def test_a_resumed_run_ends_the_same(by_one_worker, tmp_path):
    keys = (*KEYS, "train.epochs=2")
    with pytest.raises(Paused):
        train(small_run(*keys), tmp_path, launch={"stop_after_epochs": 1})
    resumed, _ = train(small_run(*keys), tmp_path, launch={"resume": "auto"})
    alone = by_one_worker(*keys)
    assert {key: resumed.summary.get(key) for key in HASHES} == {key: alone.get(key) for key in HASHES}


def test_what_is_frozen_keeps_every_bit(tmp_path):
    started = small_run(*RESNET)
    before = model_tensors(build_model(started, (1, 8, 8), 10))
    result, _ = train(started, tmp_path)
    after = open_trained(tmp_path, str(result.directory), device="cpu").weights
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    last = {name for name in before if "layer4_1" in name or "classifier" in name}
    assert changed == last


def test_a_norm_whose_weight_alone_is_frozen_still_has_statistics_of_its_lanes():
    frozen = build_model(small_run(*RESNET[:6], "model.freeze=stem.*.weight"), (1, 8, 8), 10).train()
    assert frozen.blocks.stem[1].training and not frozen.blocks.stem[1].weight.requires_grad
    whole = build_model(small_run(*RESNET), (1, 8, 8), 10).train()
    assert not whole.blocks.stem[1].training and whole.blocks.layer4_1.main[1].training


@pytest.mark.parametrize("name", ["nag", "adamw", "lamb", "muon"])
def test_a_factor_is_a_rate_of_its_own(name):
    """The first pattern that fits decides; each parameter moves as in a run with its rate."""
    optimizer = Optimizer(name, lr=0.5, weight_decay=0.1, rates=("block1:0.25", "head:4", "b*1.0.bias:9"))
    factors = {"block1": 0.25, "classifier": 4.0}
    ours = _moved(optimizer)
    plain = {f: _moved(Optimizer(name, 0.5 * f, 0.1, options=_rest(name, f))) for f in (0.25, 1.0, 4.0)}
    for key, tensor in ours.items():
        factor = next((factor for part, factor in factors.items() if part in key), 1.0)
        assert torch.equal(tensor, plain[factor][key]), key


def _rest(name, factor):
    return {"rest_lr": 1e-3 * factor} if name == "muon" else {}


def _moved(optimizer):
    model = build_model(small_run(), (1, 16, 16), 10)
    state = TrainState.begin(model, optimizer, 0.0)
    torch.manual_seed(0)
    for step in range(2):
        grads = {name: torch.randn_like(p) for name, p in state.trained().items()}
        update_state(state, step, [group.optimizer.lr for group in state.groups], grads)
    return state.trained()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["model.freeze=blokc1"], "model.freeze=blokc1 fits no parameter that is trained; there "),
        (["optimizer.rates=hiden*:2"], "there are blocks.hidden"),
        (["model.freeze=block1", "optimizer.rates=block1:2"], "optimizer.rates=block1 fits no"),
        (["optimizer.rates=head"], "optimizer.rates=head must be PATTERN:FACTOR"),
        (["optimizer.rates=head:0"], "to keep parameters as they are: model.freeze=head"),
        (["optimizer.rates=head:nan"], "the factor must be above 0"),
        (["model.freeze=block*"], "model.freeze=block* fits every parameter"),
    ],
)
def test_a_wrong_pattern_is_refused_before_any_work(keys, says, tmp_path):
    with pytest.raises(SpecError, match=says.replace("*", r"\*")) as caught:
        train(small_run(*keys), tmp_path)
    assert "\n" not in str(caught.value) and not any(tmp_path.iterdir())
