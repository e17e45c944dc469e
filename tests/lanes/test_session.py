"""A session in one process: what it refuses, what it keeps, and its pieces by themselves."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep import lanes
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.errors import (
    CheckpointError,
    DataError,
    IdentityError,
    LockstepError,
    ModelError,
    NumericsError,
    SpecError,
)
from lockstep.lanes import LaneSampler, verify
from lockstep.lanes.script import Script
from lockstep.lanes.session import Session

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(64 * 6.0).view(64, 6) % 7 - 3, torch.arange(64) % 3)


class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return DATA[number][0] + torch.randn(6), DATA[number][1]


def make(*, lanes=4, seed=0, **options):
    session = Session(Script(WorkerGroups(None, "auto", CPU), CPU, lanes, seed, options.get("trace")))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return session, *session.setup(model, optimizer)


def take(session, model, batch, **options):
    with session.step(**options) as step:
        for x, y in batch:
            step.backward(F.cross_entropy(model(x), y))
            step.log(right=(model(x).argmax(1) == y).sum())
    return step


def train(session, model, epochs=2, data=DATA, processes=0, stop=None, save=None):
    for _ in session.epochs(epochs):
        for batch in session.loader(data, batch=16, processes=processes):
            step = take(session, model, batch)
            if session.steps == stop:
                session.save(save)
                return step
    return step


def test_it_learns_and_reports():
    session, model, _ = make()
    first = take(session, model, next(iter(session.loader(DATA, batch=16)))).loss
    assert session.steps == 1 and first > 0
    session, model, _ = make()
    last = train(session, model, epochs=30)
    assert last.loss < first and 0 <= last["right"] <= 4


def test_samples_read_by_processes_are_the_same():
    hashes = set()
    for processes in (0, 1):
        session, model, _ = make()
        train(session, model, data=Noisy(), processes=processes)
        hashes.add(session.hash(model))
    assert len(hashes) == 1


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_file_goes_on_to_the_same_bits(stop, tmp_path):
    session, model, _ = make()
    train(session, model, epochs=2, data=Noisy())
    whole = session.hash()
    session, model, _ = make()
    train(session, model, data=Noisy(), stop=stop, save=tmp_path / "a.safetensors")
    session, model, _ = make()
    assert session.load(tmp_path / "a.safetensors")
    train(session, model, epochs=2, data=Noisy())
    assert session.hash() == whole


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    session, model, _ = make()
    assert not session.load(path, missing_ok=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        session.load(path)
    train(session, model, stop=2, save=path)
    with pytest.raises(IdentityError, match="lanes=4, and this script has lanes=2"):
        make(lanes=2)[0].load(path)
    session, _, optimizer = make()
    session.setup(lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(CheckpointError, match="state0"):
        session.load(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        make()[0].load(path)


def test_two_files_and_two_traces_are_compared(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        session, model, _ = make(seed=seed, trace=tmp_path / f"{name}.jsonl")
        train(session, model, stop=3, save=tmp_path / f"{name}.safetensors")
    for end in ("safetensors", "jsonl"):
        assert verify(tmp_path / f"a.{end}", tmp_path / f"b.{end}") == ""
    text = verify(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert text.startswith("20 of 27 tensors differ, first module0.0.bias at (0,): "), text
    assert verify(tmp_path / "a.jsonl", tmp_path / "c.jsonl") == "step 1 is the first that differs"


def test_schedules_averages_and_scalers_are_state(tmp_path):
    def build():
        session, model, optimizer = make()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        schedules = [
            lr_scheduler.MultiStepLR(optimizer, [2, 3, 3]),
            lr_scheduler.OneCycleLR(optimizer, 0.1, 8),
            lr_scheduler.ReduceLROnPlateau(optimizer),
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        session.setup(averaged, *schedules, scaler)
        return session, model, averaged, schedules, scaler

    def run(session, model, averaged, schedules, scaler, stop=None):
        for _ in session.epochs(2):
            for batch in session.loader(DATA, batch=16):
                step = take(session, model, batch, scaler=scaler)
                averaged.update_parameters(model)
                for schedule in schedules[:2]:
                    schedule.step()
                schedules[2].step(step.loss)
                if session.steps == stop:
                    session.save(tmp_path / "b.safetensors")
                    return ""
        return session.hash()

    whole = run(*build())
    run(*build(), stop=5)
    parts = build()
    parts[0].load(tmp_path / "b.safetensors")
    assert run(*parts) == whole and parts[-1].get_scale() > 256


def test_evaluation_sums_every_sample_once():
    session, model, _ = make()
    buffers = session.hash()
    sums = session.evaluate(DATA, batch=10)
    for x, y in sums:
        model(x)  # in training mode, which changes running means
        sums.add(count=len(y), labels=y.sum())
    assert (sums["count"], sums["labels"]) == (64, DATA[:][1].sum())
    assert session.hash() == buffers


def test_what_is_not_finite_changes_nothing():
    session, model, _ = make()
    before = session.hash(model)
    text = r"step 0: the gradient of module0\.0\.weight is not finite"
    with pytest.raises(NumericsError, match=text), session.step() as step:
        for x, y in next(iter(session.loader(DATA, batch=16))):
            step.backward(F.cross_entropy(model(x), y) * float("nan"))
    assert session.hash(model) == before


def test_wrong_use_is_refused_by_name():
    session, model, _ = make()
    batch = next(iter(session.loader(DATA, batch=16)))
    with pytest.raises(ModelError, match="before the first loop"):
        session.setup(nn.Linear(1, 1))
    with pytest.raises(LockstepError, match="a step without lanes"), session.step():
        pass
    with pytest.raises(LockstepError, match="inside `for lane in batch`"), session.step() as step:
        step.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(LockstepError, match=r"inside `with session\.step"):
        list(batch)
    with pytest.raises(LockstepError, match="inside another one"), session.step(), session.step():
        pass
    take(session, model, batch)  # nothing is left of it
    with pytest.raises(LockstepError, match="one loader at a time"):
        list(zip(session.loader(DATA, batch=16), session.loader(DATA, batch=16), strict=True))
    with pytest.raises(LockstepError, match=r"lane 0 had no step\.backward"), session.step():
        for _ in batch:
            pass
    with pytest.raises(DataError, match="map-style"):
        session.loader(iter([1]), batch=16)
    with pytest.raises(ModelError, match=r"give SGD to session\.setup first"):
        session.step(torch.optim.SGD(model.parameters()))
    session, model, _ = make()
    with pytest.raises(ModelError, match="scaler"):
        session.step(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ModelError, match="set up before"):
        session.setup(model)
    with pytest.raises(ModelError, match="SyncBatchNorm"):
        session.setup(nn.Sequential(nn.SyncBatchNorm(3)))
    with pytest.raises(ModelError, match="of no module"):
        session.setup(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ModelError, match="LBFGS"):
        session.setup(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ModelError, match="int has no state_dict"):
        session.setup(3)


def test_a_loop_that_is_left_early_is_not_gone_on_with():
    session, model, _ = make()
    batches = iter(session.loader(DATA, batch=16))
    with pytest.raises(LockstepError, match="to its end"), session.step():
        for _ in next(batches):
            break
    with pytest.raises(LockstepError, match="was left before its end"):
        next(batches)
    session, model, _ = make()
    for _ in session.evaluate(DATA, batch=10):
        break
    with pytest.raises(LockstepError, match="was left before its end"):
        train(session, model)


def test_a_file_does_not_fit_a_script_that_was_changed(tmp_path):
    path = tmp_path / "a.safetensors"
    session, model, _ = make()
    train(session, model, epochs=3, stop=9, save=path)

    def go_on(epochs=3, data=DATA, before=None):
        session, model, _ = make()
        session.load(path)
        for _ in session.epochs(epochs):
            for batch in session.loader(data, batch=16):
                if before:
                    before(session)
                assert session.steps == 4 * batch.epoch + batch.number
                with session.step() as step:
                    for x, y in batch:
                        step.backward(F.cross_entropy(model(x), y))
                    assert all(p.grad is not None for p in model.parameters())

    with pytest.raises(LockstepError, match="saved in epoch 2, counted from 0, and this script has 1"):
        go_on(epochs=1)
    with pytest.raises(LockstepError, match="saved with 64 samples in batches of 16, and now there are 32"):
        go_on(data=torch.utils.data.Subset(DATA, range(32)))
    with pytest.raises(LockstepError, match="comes to an evaluation where it came to a step"):
        go_on(before=lambda session: list(session.evaluate(DATA, batch=10)))
    go_on()
    session, model, _ = make()
    train(session, model, epochs=1)
    with pytest.raises(LockstepError, match="one loop over epochs"):
        train(session, model, epochs=2)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda step: step.backward(1.0), "got float"),
        (lambda step: step.backward(torch.ones(3)), "float32 3 without"),
        (lambda step: step.backward(torch.ones(())), "without a gradient"),
        (lambda step: step.backward(torch.ones((), requires_grad=True) * 2), "no parameter"),
        (lambda step: step.log(a="text"), "a is str: give one number"),
        (lambda step: step.log(a=torch.ones(3)), "float32 3: give one number"),
    ],
)
def test_wrong_use_in_a_lane_is_refused(use, text):
    session, _, _ = make()
    batch = next(iter(session.loader(DATA, batch=16)))
    with pytest.raises(LockstepError, match=text), session.step() as step:
        for _ in batch:
            use(step)


def test_leftovers_of_a_plain_loop_are_refused():
    for leftover, text in ((0, "leave it out"), (1, "in place of loss"), (2, "another name")):
        session, model, optimizer = make()
        batch = next(iter(session.loader(DATA, batch=16)))
        with pytest.raises(LockstepError, match=text), session.step() as step:
            for x, y in batch:
                loss = F.cross_entropy(model(x), y)
                loss.backward() if leftover == 1 else step.backward(loss)
                if leftover == 2:
                    step.log(loss=loss)
            optimizer.step()


def test_the_sampler_gives_every_worker_its_lanes():
    whole = list(LaneSampler(70, batch=16, lanes=4, seed=3))
    assert len({number for lane in whole for number in lane}) == 64
    for workers in (2, 3, 4):
        parts = [LaneSampler(70, batch=16, lanes=4, seed=3, workers=workers, rank=r) for r in range(workers)]
        steps = [[part.lane(step, lane) for part in parts for lane in part.own] for step in range(4)]
        assert [lane for step in steps for lane in step] == whole
    later = LaneSampler(70, batch=16, lanes=4, seed=3)
    later.step = 2
    assert list(later) == whole[8:] and len(later) == 8
    later.epoch, later.step = 1, 0
    assert list(later) != whole
    images, _ = next(iter(DataLoader(DATA, batch_sampler=LaneSampler(64, batch=16, lanes=4))))
    assert len(images) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lanes": 3}, "power of two"),
        ({"batch": 18}, "multiple of lanes=4"),
        ({"batch": 128}, "more than the 70 samples"),
        ({"workers": 5, "rank": 4}, "a lane of its own"),
    ],
)
def test_the_sampler_refuses(options, text):
    with pytest.raises(SpecError, match=text):
        LaneSampler(70, **{"batch": 16, "lanes": 4, **options})


class Counts(torch.nn.Module):
    """Keeps a number, a tensor and a generator outside of its state."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.last = torch.nn.Linear(2, 1), 0, None
        self.draw = torch.Generator()

    def forward(self, x):
        self.calls, self.last = self.calls + 1, x
        return self.linear(x)


def test_what_every_worker_has_its_own_of_is_warned_of_by_name():
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match=r"session\.setup \(Counts\) holds a generator of its own, 'draw'"):
        session = lanes.join(model, optimizer, lanes=2, device="cpu")
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    data.generator = np.random.default_rng(0)
    with pytest.warns(UserWarning, match=r"session\.loader \(TensorDataset\) holds a generator of its own"):
        loader = session.loader(data, 4)
    seen = []
    with pytest.warns(UserWarning) as told:
        for batch in loader:
            with session.step() as step:
                for (x,) in batch:
                    seen.append(step.lane)
                    step.backward(model(x).mean())
    assert seen == [0, 1, 0, 1]
    texts = [str(warning.message) for warning in told]
    assert texts and all("changes its attribute 'calls' in every lane" in text for text in texts)
    session.close()


def test_random_bits_and_dropout_by_key():
    key = lanes.random.key("flip", 0, 3)
    ids = torch.tensor([5, 2, 9])
    assert lanes.random.integers(key, ids, 2)[1] == lanes.random.integers(key, ids[1:2], 2)[0]
    x = torch.ones(4, 100)
    kept = lanes.dropout(x, 0.5, key)
    assert torch.equal(kept, lanes.dropout(x, 0.5, key)) and set(kept.unique().tolist()) == {0.0, 2.0}
