"""Training in fp16: steps that overflow, by any number of workers, under plans, stopped and resumed."""

import signal
from itertools import pairwise

import forked
import pytest
import torch
from small import rows, small_run, summary, train, train_command
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep.data.loader import Lanes
from lockstep.errors import GroupLost, Interrupted, NumericsError
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.runs.event import Notice, StepDone
from lockstep.runs.journal import Journal
from lockstep.runs.state_parts import StateParts
from lockstep.runs.train_state import TrainState
from lockstep.spec import Run, Train
from lockstep.spec.rule.loss_scale import LossScale, begin_scale
from lockstep.train import step as step_module
from lockstep.train.step import Step

SCALE = f"train.loss_scale={2**20}"  # from which the first steps overflow
KEYS = (
    "train.precision=fp16",
    SCALE,
    "train.scale_growth=3",
    "train.ema=0.9",
    "optimizer.name=adam",
    "optimizer.lr=0.01",
    "data.num_train=170",
)
HASHES = (
    *("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy", "identity", "steps"),
    *("skipped_steps", "loss_scale"),
)


def hashes(found):
    return {key: found[key] for key in HASHES}


def normed():
    """With a batch norm and dropout, whose input is the image."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Dropout(0.2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def states(state):
    """What a step may change, besides the cursor and the scale."""
    return {name: tensor.clone() for name, tensor in state.named().items()}


def test_a_step_that_overflows_changes_nothing_and_is_counted(tmp_path, monkeypatch):
    seen, own = [], Journal.step

    def note(journal, done, state):
        seen.append((done, states(state), state.updates, state.scale))
        own(journal, done, state)

    monkeypatch.setattr(Journal, "step", note)
    result, events = train(small_run(*KEYS), tmp_path, model=normed())
    skipped = [done for done, *_ in seen if done.skipped]
    assert 1 < len(skipped) < len(seen) - 2
    assert result.summary["skipped_steps"] == len(skipped)
    assert result.summary["loss_scale"] == seen[-1][3].value
    for (_, before, updates, scale), (done, after, more, moved) in pairwise(seen):
        same = all(torch.equal(before[name], after[name]) for name in before)
        assert same == done.skipped
        assert more == updates + (not done.skipped)
        assert done.scale == scale.value and moved == scale.after(done.skipped, 3)
    assert max(scale.value for *_, scale in seen[len(skipped) :]) > min(scale.value for *_, scale in seen)
    told = rows(tmp_path / "run", "step")
    assert [row.get("skipped", False) for row in told] == [done.skipped for done, *_ in seen]
    assert [row["step"] for row in told] == list(range(1, len(seen) + 1))
    text = f"{len(skipped)} steps overflowed in fp16"
    assert any(isinstance(event, Notice) and event.text.startswith(text) for event in events)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("workers", "flags", "overrides"),
    [
        (2, (), ()),
        (3, ("--bucket-mb", "0.05"), ()),
        (3, ("--plan", "data=3,shard=gradients"), ("train.clip=1.0",)),
        (2, ("--plan", "pipeline=2"), ("train.clip=1.0",)),
        (2, (), ("train.compress=int8",)),
        (3, (), ("train.compress=top:0.1", "train.wire=fp32")),
        (2, ("--plan", "channel=2"), ("train.bands=2", "train.slices=2", "train.wire=bf16")),
    ],
    ids=["2", "3", "shares", "pipeline", "int8", "top", "channel"],
)
def test_the_bits_are_those_of_one_worker(workers, flags, overrides, by_one_worker, tmp_path):
    keys = (*KEYS, *overrides)
    command = train_command(tmp_path, "--workers", str(workers), *flags, overrides=keys)
    done = forked.call(command, launches=True)
    assert done.returncode == 0, done.stderr
    alone = by_one_worker(*keys)
    assert alone["skipped_steps"] > 1
    assert hashes(summary(tmp_path / "run")) == hashes(alone)


@pytest.mark.parametrize("after", [2, 7])
def test_a_run_that_was_stopped_goes_on_with_its_scale(after, by_one_worker, tmp_path):
    def stop(event):
        if isinstance(event, StepDone) and event.step == after:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match=f"after step {after + 1}"):
        train(small_run(*KEYS), tmp_path, on_event=stop)
    resumed, _ = train(small_run(*KEYS), tmp_path, launch={"resume": "auto"})
    assert hashes(resumed.summary) == hashes(by_one_worker(*KEYS))


def test_a_worker_that_lost_the_others_before_it_knew_of_the_overflow_skips_the_step_too(monkeypatch):
    """A state in parts: what the others decided comes as the norm of a step that they have committed."""

    def begin():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        run = Run(train=Train(batch=8, lanes=2, precision="fp16", loss_scale=2.0**30))
        state = TrainState.begin(model, run.optimizer, 0.0, StateParts())
        state.scale = begin_scale("fp16", run.train.loss_scale)
        return state, Step(run, state, LaneByLane(model, cross_entropy, 0, torch.float16), 10)

    def lose(*_):
        raise GroupLost("the others are gone")

    images = torch.randn(8, 1, 4, 4)
    lanes = Lanes(images, torch.arange(8) % 3, 2)
    (whole, step), (torn, broken) = begin(), begin()
    before = states(torn)
    assert step(lanes).skipped
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "merge_stages", lose)
        with pytest.raises(GroupLost):
            broken(lanes)
    assert torn.finish and torn.step == 0
    torn.finish(whole.norm)
    assert torn.cursor() == whole.cursor() and torn.scale == LossScale(2.0**29, 0, 1)
    assert all(torch.equal(states(torn)[name], before[name]) for name in before)


LANES_BEFORE = 30


class Exploding(nn.Module):
    """Linear; after some lanes its output, or only its gradient, is not finite."""

    def __init__(self, in_forward):
        super().__init__()
        torch.manual_seed(0)
        self.last, self.in_forward, self.seen = nn.Linear(256, 10), in_forward, 0

    def forward(self, x):
        self.seen += self.training
        logits = self.last(x.flatten(1))
        if self.seen <= LANES_BEFORE:
            return logits
        if not self.in_forward and logits.requires_grad:
            logits.register_hook(lambda grad: grad * torch.inf)
        return logits * torch.inf if self.in_forward else logits


@pytest.mark.parametrize("in_forward", [True, False])
def test_what_no_scale_mends_is_an_error(in_forward, tmp_path):
    """A loss that is not finite at once, a gradient when the scale is 1."""
    keys = ("train.precision=fp16", "train.loss_scale=4")
    with pytest.raises(NumericsError, match=r"not finite.* or use train.precision=bf16"):
        train(small_run(*keys), tmp_path, model=Exploding(in_forward))
    told = [row.get("skipped", False) for row in rows(tmp_path / "run", "step")]
    assert sum(told) == (0 if in_forward else 2)


def test_it_is_close_to_fp32(tmp_path):
    found = {}
    for precision, keys in (("fp32", ()), ("fp16", ("train.loss_scale=1024",))):
        run = small_run(f"train.precision={precision}", "data.num_train=170", *keys)
        found[precision] = train(run, tmp_path / precision, model=normed())[0].summary
    assert found["fp16"]["loss"] == pytest.approx(found["fp32"]["loss"], rel=0.005)
    assert found["fp16"]["loss"] != found["fp32"]["loss"]
    assert found["fp16"]["skipped_steps"] == 0
