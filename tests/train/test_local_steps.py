"""Several steps of a lane by itself: by hand, by any number of workers, after kills, and what is refused."""

import copy
import json
import signal
from dataclasses import replace

import forked
import pytest
import torch
from job import Job, faulty_job
from small import rows, small_run, summary, train, train_command
from torch import nn
from torch.nn import functional as F
from world import in_threads

import lockstep
from lockstep.comm.mesh import plain_mesh
from lockstep.comm.tree import worker_lanes
from lockstep.data.loader import Lanes
from lockstep.errors import GroupLost, NumericsError, SpecError
from lockstep.kernels import random
from lockstep.kernels.dropout import dropout
from lockstep.lower.local_lanes import LocalLanes, join_round
from lockstep.models.tensors import tensors_sha256
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer, Run, Schedule, Train
from lockstep.train.foresight.step_parts import StepParts
from lockstep.train.result import StepResult
from lockstep.train.step import Step

LANES, IN_LANE, STEPS, SEED, SPOILT = 4, 3, 3, 5, 1e3
RUN = ("train.lanes=8", "train.local_steps=4", "train.ema=0.9", "train.clip=4.0", "checkpoint.every_steps=5")
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy", "identity", "steps")


def network(dtype=torch.float32):
    torch.manual_seed(3)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(100, 3)).to(dtype)


def batches(count, lanes=range(LANES), dtype=torch.float32, first=0):
    """So many batches, of each the given lanes."""
    found = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(LANES, IN_LANE, 2, 5, 5, generator=generator, dtype=dtype)
        labels = torch.randint(0, 3, (LANES, IN_LANE), generator=generator)
        own = slice(lanes.start, lanes.stop)
        found.append(Lanes(images[own].flatten(0, 1), labels[own].flatten(), len(lanes), lanes.start))
    return found


class Training:
    """A model with its state, ready to walk rounds."""

    def __init__(self, model, rule, group=None, **keys):
        self.model, keys = model, {"local_steps": STEPS, **keys}
        train = Train(batch=LANES * IN_LANE, lanes=LANES, **keys)
        self.run = Run(seed=SEED, train=train, optimizer=rule, schedule=Schedule("constant"))
        self.state = TrainState.begin(model, rule, train.ema)
        self.lowered = LocalLanes(model, F.cross_entropy, SEED, half=None)
        mesh = plain_mesh(group) if group else None
        self.step = Step(self.run, self.state, self.lowered, 10, mesh, bucket_mb=1e-3)

    def sha(self):
        return tensors_sha256(dict(self.state.tensors()))


def walk_by_hand(model, lane, lanes_of_batches, rate, first_step=0):
    """A lane in plain PyTorch: its losses, and the sum of its gradients; the model is changed."""
    params, losses, total = list(model.parameters()), [], None
    for number, lanes in enumerate(lanes_of_batches):
        drop = ("dropout", SEED, first_step + number, lane, "3")
        model[3].forward = lambda x, key=drop: dropout(x, 0.3, random.key(*key))
        images, labels = lanes.lane(lane)
        loss = F.cross_entropy(model.train()(images), labels)
        grads = torch.autograd.grad(loss, params)
        total = list(grads) if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        losses.append(loss.detach())
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param.sub_(rate * grad)
    return losses, total


def tree(values):
    half = len(values) // 2
    return values[0] if len(values) == 1 else tree(values[:half]) + tree(values[half:])


def test_two_rounds_equal_those_by_hand_bit_for_bit():
    """With momentum outside; the second round keys its dropout by the true steps, and is shorter."""
    rate, training = 0.1, Training(network(), Optimizer("momentum", lr=0.1))
    by_hand = network()
    velocity = [torch.zeros_like(p) for p in by_hand.parameters()]
    for first, count in ((0, 3), (3, 2)):
        given = batches(count, first=first)
        walked = [copy.deepcopy(by_hand) for _ in range(LANES)]
        found = [walk_by_hand(walked[lane], lane, given, rate, first) for lane in range(LANES)]
        with torch.no_grad():
            for place, param in enumerate(by_hand.parameters()):
                velocity[place] = velocity[place] * 0.9 + tree([total[place] for _, total in found]) / LANES
                param.sub_(velocity[place] * rate)
            for name, buffer in by_hand.named_buffers():
                kept = [dict(model.named_buffers())[name] for model in walked]
                buffer.copy_(tree(kept) / LANES if buffer.is_floating_point() else kept[0])
        result = training.step(join_round(given))
        loss = tree([sum(losses[1:], losses[0]) / count for losses, _ in found]) / LANES
        assert (result.loss, result.steps) == (float(loss), count)
        for name, tensor in training.model.state_dict().items():
            assert torch.equal(tensor, by_hand.state_dict()[name]), name
    assert training.model.state_dict()["1.num_batches_tracked"] == 5
    state = training.state
    assert (state.step, state.step_in_epoch, state.updates) == (5, 5, 2)


def test_sgd_is_local_sgd():
    """Against PyTorch's own optimizer on a copy of the model for each lane, whose weights are averaged."""
    model = network(torch.float64)
    model[3].p = 0.0
    copies = [copy.deepcopy(model) for _ in range(LANES)]
    given = batches(STEPS, dtype=torch.float64)
    for lane, each in enumerate(copies):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.2)
        for lanes in given:
            optimizer.zero_grad()
            images, labels = lanes.lane(lane)
            F.cross_entropy(each.train()(images).float(), labels).backward()  # losses are in fp32
            optimizer.step()
    Training(model, Optimizer("sgd", lr=0.2)).step(join_round(given))
    for name, tensor in model.state_dict().items():
        mean = torch.stack([each.state_dict()[name].double() for each in copies]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-12, atol=1e-13)


def test_batches_of_any_targets_are_joined_lane_by_lane():
    given = [replace(each, labels={"a": each.labels, "b": each.images.sum(1)}) for each in batches(STEPS)]
    joined = join_round(given)
    assert (joined.steps, joined.lane_size) == (STEPS, STEPS * IN_LANE)
    for lane in range(LANES):
        walk = Lanes(*joined.lane(lane), STEPS)
        for number, each in enumerate(given):
            (images, labels), (own, targets) = walk.lane(number), each.lane(lane)
            assert torch.equal(images, own)
            assert torch.equal(labels["a"], targets["a"]) and torch.equal(labels["b"], targets["b"])


def test_an_optimizer_counts_rounds_and_so_do_averages():
    adam, ema = Optimizer("adam", lr=0.1), 0.9
    training = Training(network(), adam, ema=ema)
    averages = {name: value.clone() for name, value in training.state.ema.items()}
    for number in range(2):
        training.step(join_round(batches(STEPS, first=STEPS * number)))
        decay = (1 + number) / (10 + number)
        for name, value in training.model.state_dict().items():
            if name in averages:
                averages[name] = averages[name] * decay + value * (1.0 - decay)
    for name, value in training.state.ema.items():
        assert torch.equal(value, averages[name]), name
    again = TrainState.begin(network(), adam, ema)
    again.load_cursor(training.state.cursor())
    assert (again.step, again.updates) == (6, 2)


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_sums_leave_early_and_are_the_same(workers):
    """Buckets of a parameter or two, so that they travel while the last step of the last lane goes back."""
    model = network()  # before the threads, as all draw from one stream

    def work(group):
        own = worker_lanes(LANES, group.size, group.rank)
        training = Training(copy.deepcopy(model), Optimizer("nag", lr=0.1), group)
        found = [training.step(join_round(batches(STEPS, own, first=3 * n))) for n in range(2)]
        training.step.close()
        return training.sha(), found

    alone = Training(network(), Optimizer("nag", lr=0.1))
    expected = [alone.step(join_round(batches(STEPS, first=3 * n))) for n in range(2)]
    for sha, found in in_threads(workers, work):
        assert sha == alone.sha()
        assert [(r.loss, r.correct) for r in found] == [(r.loss, r.correct) for r in expected]


class Breaking(nn.Module):
    """A network whose call number `fails` does that, and which gives no numbers for spoilt images."""

    def __init__(self, fails):
        super().__init__()
        self.inner, self.fails, self.calls = network(), fails, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails:
            raise GroupLost("a worker died")
        return self.inner(x) * torch.where(x.amax() > SPOILT, torch.nan, 1.0)


def test_what_breaks_in_a_round_changes_nothing():
    given = join_round(batches(STEPS))
    training = Training(Breaking(fails=5), Optimizer("momentum", lr=0.1))
    other = Training(Breaking(fails=0), Optimizer("momentum", lr=0.1))
    before = training.sha()
    with pytest.raises(GroupLost):  # in the second step of the second lane, whose weights have moved
        training.step(given)
    assert training.sha() == before
    assert training.step(given) == other.step(given)
    assert training.sha() == other.sha()
    before, given = training.sha(), batches(STEPS)
    given[1].images[IN_LANE, 0, 0, 0] = 2 * SPOILT
    with pytest.raises(NumericsError, match=r"step 3: not finite: loss in lane 1 in step 4 \(loss nan"):
        training.step(join_round(given))
    assert training.sha() == before
    assert training.state.step == 3


def hashes(found):
    return {key: found[key] for key in HASHES}


def test_one_is_what_it_was(by_one_worker, tmp_path):
    found = by_one_worker("train.local_steps=1")
    assert hashes({**found, "ema_sha256": ""}) == hashes({**by_one_worker(), "ema_sha256": ""})
    several, events = train(small_run("train.local_steps=4"), tmp_path)
    assert several.summary["weights_sha256"] != found["weights_sha256"]
    done = [event for event in events if type(event).__name__ == "StepDone"]
    assert [(row.step, row.steps) for row in done] == [(n, s) for e in (0, 10) for n, s in
                                                       ((e + 4, 4), (e + 8, 4), (e + 10, 2))]  # fmt: skip
    told = rows(tmp_path / "run", "step")
    assert [row["positions"] for row in told[:3]] == [[0, 128], [128, 256], [256, 320]]
    saved = {path.stem for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors")}
    assert "step-000000020" in saved and several.summary["steps"] == 20


@pytest.mark.gloo
@pytest.mark.parametrize(("compress", "workers"), [("none", 3), ("none", 8), ("int8", 4)])
def test_any_number_of_workers(compress, workers, by_one_worker, tmp_path):
    overrides = (*RUN, "data.augment=flip,crop", f"train.compress={compress}")
    flags = ["--workers", str(workers), "--bucket-mb", "0.05"]
    done = forked.call(train_command(tmp_path, *flags, overrides=overrides), launches=True)
    assert done.returncode == 0, done.stderr
    assert hashes(summary(tmp_path / "run")) == hashes(by_one_worker(*overrides))
    assert summary(tmp_path / "run")["sent_mb_step"] > 0


@pytest.mark.gloo
@pytest.mark.parametrize("compress", ["none", "int8"])
def test_stopped_within_an_epoch_and_resumed_by_others(compress, by_one_worker, tmp_path):
    overrides = (*RUN, f"train.compress={compress}")
    with Job(tmp_path, "--workers", "2", overrides=overrides, paced=True) as job:
        job.wait_for_steps(4)
        job.process.send_signal(signal.SIGTERM)
        job.wait_for(lambda: "saving after this step" in job.errors())
        job.hurry()
        job.finish(143)
        assert job.steps() in (4, 8, 10, 14, 18), "it stopped at the end of a round"
    done = forked.call(
        train_command(tmp_path, "--workers", "3", "--resume", "auto", overrides=overrides), launches=True
    )
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path / "run", "step")] == [4, 8, 10, 14, 18, 20]
    assert hashes(summary(tmp_path / "run")) == hashes(by_one_worker(*overrides))


@pytest.mark.gloo
def test_deaths_in_a_round(by_one_worker, tmp_path):
    """Before a round, within its commit and after it, and where a checkpoint is due by one of its steps."""
    keys, marks = RUN, tmp_path / "marks"
    faults = [("before the step", 4, 1), ("before the checkpoint", 4, 0), ("within the commit", 10, 0),
              ("after the commit", 14, 1), ("before the commit", 18, 1)]  # fmt: skip
    marks.mkdir()
    with faulty_job(tmp_path, keys, FAULTS=json.dumps(faults), FAULT_DIR=str(marks)) as job:
        job.finish()
    happened = {path.name for path in marks.iterdir()}
    assert not [fault for fault in faults if "-".join(map(str, fault)).replace(" ", "_") not in happened]
    assert hashes(summary(job.run)) == hashes(by_one_worker(*keys))
    assert [row["step"] for row in rows(job.run, "step")] == [4, 8, 10, 14, 18, 20]


@pytest.mark.gloo
def test_a_kill_with_compression_goes_back_to_a_round(by_one_worker, tmp_path):
    overrides = (*RUN, "train.compress=int8")
    with Job(tmp_path, "--workers", "3", overrides=overrides, paced=True) as job:
        job.wait_for_steps(4)
        job.wait_for_workers("1")
        job.kill("1")
        job.wait_for(job.generations, "the next generation")
        job.hurry()
        job.finish()
    assert hashes(summary(tmp_path / "run")) == hashes(by_one_worker(*overrides))


def test_the_seconds_of_a_round_are_those_of_its_steps():
    parts = StepParts()
    for _ in range(6):
        parts.add(0.8, StepResult(1.0, 0, 0.1, compute_s=0.4, exchange_s=0.2, steps=4))
    told = parts.compare({"step_s": 1.0, "exchange_s": 1.0, "compute_s": 1.0, "host_s": 1.0})
    assert {key: pair[1] for key, pair in told.items()} == {
        "step_s": 0.2, "exchange_s": 0.05, "compute_s": 0.1, "host_s": 0.05
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("train.local_steps=0",), r"train\.local_steps=0 must be at least 1"),
        (("train.local_steps=600000",), r"use at most 524288"),
        (
            ("train.local_steps=2", "train.sync_norm=true"),
            r"train\.sync_norm=true does not go with train\.lo",
        ),
        (
            ("train.local_steps=2", "kernels.set=fused"),
            r"kernels\.set=fused does not go with .*kernels\.set=a",
        ),
        (("train.local_steps=2", "kernels.set=compiled"), r"kernels\.set=compiled does not go"),
    ],
)
def test_bad_input_is_one_line(keys, words):
    with pytest.raises(SpecError, match=words) as error:
        small_run(*keys)
    assert "\n" not in str(error.value)


def test_what_a_launch_does_not_go_with(tmp_path):
    run = small_run("train.local_steps=2", "train.slices=2", "train.bands=2")
    for plan in ("pipeline=2", "channel=2", "spatial=2", "data=2,shard=optimizer", "data=2,layers=*"):
        with pytest.raises(SpecError, match=r"not with train\.local_steps=2, in which each lane has whole w"):
            lockstep.Launch(plan=plan, workers=2).check_run(run)
    with pytest.raises(SpecError, match=r"--audit .*train\.local_steps=2 a lane has weights of its own"):
        lockstep.Launch(audit=3).check_run(run)
    found, _ = train(run, tmp_path)  # a grid of sums goes with it
    assert found.summary["steps"] == 20
    _, events = train(small_run("train.local_steps=11", "train.epochs=1"), tmp_path / "long")
    assert any("no round is longer than the 10 steps of an epoch" in str(event) for event in events)
    assert [row["steps"] for row in rows(tmp_path / "long" / "run", "step")] == [10]
