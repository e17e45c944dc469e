"""Whole steps on the device, by Triton's interpreter: the bits of steps that go through the host."""

from __future__ import annotations

import copy
import signal
import sys
from pathlib import Path

import forked
import pytest
import torch
from job import Job, assert_no_step_lost
from photos import photo_run, take_photos
from small import rows, small_run, summary, train
from tiny_resnet import TinyResNet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.data.store import MemorySplit
from lockstep.errors import Interrupted, ModelError, NumericsError, SpecError
from lockstep.lower.compiled import compiled_program
from lockstep.models.resnet import BasicBlock
from lockstep.runs.event import StepDone
from lockstep.train import grid
from lockstep.train.device import prefetch as images
from lockstep.train.engine import Engine
from lockstep.train.step import Step

SIZES = ("data.size=8", "data.num_train=14", "data.num_test=4", "train.batch=4", "train.lanes=2")
AUGMENT = 'data.augment=["flip","crop:1","cutout:2"]'
KEYS = (*SIZES, "kernels.set=fused")
DECAY = ("optimizer.decay_norms=false", "optimizer.weight_decay=0.1")
TWO_STEPS = "data.num_train=8"  # an epoch
# the first step overflows, and two that do not double the scale
SCALED = (
    "train.precision=fp16",
    f"train.loss_scale={2**18}",
    "train.scale_growth=2",
    "train.epochs=2",
    TWO_STEPS,
)


@pytest.fixture(autouse=True)
def no_fingerprint_of_a_lane(monkeypatch):
    """It has tests of its own, and the interpreter would take as long for it as for a step."""
    monkeypatch.setattr(grid, "fingerprint_lane", lambda *given, **how: "left out")


@pytest.fixture(autouse=True)
def one_proof_of_lanes(monkeypatch):
    """The same for runs of the same model in a test: it has tests of its own, too, and takes long."""
    prove, known = compiled_program.prove_convs, {}

    def find(model, values, train, device):
        key = str((values, train))
        if key not in known:
            known[key] = prove(model, values, train, device)
        return known[key]

    monkeypatch.setattr(compiled_program, "prove_convs", find)


def tiny(**options):
    """Two fused convolutions and two fully connected layers, the first with dropout."""
    torch.manual_seed(0)
    channels, classes = 1, 10
    layers = [nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU()]
    head = [nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, classes)]
    return nn.Sequential(*layers, *head)


def small():
    """One fused convolution and one fully connected layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 10))


def wide():
    """The same with a matrix that is large enough to be compressed."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 66), nn.ReLU(), nn.Linear(66, 10))


def residual():
    """A stem and a block with a stride and a projection."""
    torch.manual_seed(0)
    return TinyResNet(BasicBlock(8, 16, 2), channels=16, colours=1)


def stem():
    """A residual network without a block: one convolution with a batch norm."""
    torch.manual_seed(0)
    return TinyResNet(channels=8, colours=1)


def fused(tmp_path, *overrides, model=tiny, **arguments):
    return train(small_run(*KEYS, *overrides), tmp_path, model=model(), **arguments)


def through_host(tmp_path, *overrides, **arguments):
    """The same, no step of which stays on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_make_device_epochs", lambda engine: None)
        return fused(tmp_path, *overrides, **arguments)


def hashes(result):
    return {key: value for key, value in result.summary.items() if key.endswith("sha256")}


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # by the interpreter
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (
            tiny,
            ("optimizer.name=nag", "train.label_smoothing=0.1", "train.class_weights=balanced", AUGMENT),
        ),
        (tiny, (*DECAY, "optimizer.name=adamw", "optimizer.lr=0.01", "train.clip=0.5", "train.ema=0.9")),
        (tiny, ("optimizer.name=sgd", "train.wire=bf16", "optimizer.rates=head:3,0.weight:0.5")),
        (tiny, (DECAY[1], "optimizer.name=lars", "optimizer.lr=5", "train.clip=0.5", "train.ema=0.9")),
        (stem, (DECAY[1], "optimizer.name=lamb", "optimizer.lr=0.01", TWO_STEPS)),
        (residual, ("train.ema=0.9", "train.clip=0.5", TWO_STEPS)),
        (residual, (*DECAY, "train.wire=bf16", "data.num_train=4")),
        (residual, ("optimizer.name=muon", "optimizer.weight_decay=0.1", "train.clip=0.5", "train.ema=0.9")),
        (small, ("optimizer.name=muon", "optimizer.rest=momentum", "optimizer.rates=head:3,0:2", TWO_STEPS)),
        (wide, ("train.compress=top:0.05", "train.clip=0.5", "train.ema=0.9")),
        (wide, ("kernels.set=compiled", "train.compress=rank:2")),
        (tiny, ("kernels.set=compiled", "train.class_weights=balanced", AUGMENT)),
        (
            residual,
            (
                *DECAY,
                "kernels.set=compiled",
                "train.ema=0.9",
                "train.clip=0.5",
                "train.wire=bf16",
                TWO_STEPS,
            ),
        ),
        (tiny, (*SCALED, "optimizer.name=adam", "train.ema=0.9", "train.clip=0.5")),
        (residual, (*SCALED, "kernels.set=compiled", "train.recompute=true", "train.clip_value=0.01")),
        (wide, (*SCALED, "kernels.set=compiled", "train.compress=int8")),
        (residual, ("kernels.set=compiled", "train.batch=2@0,4@1", "train.epochs=2", "data.num_train=4")),
    ],
    ids=[
        "nag",
        "adamw",
        "wire",
        "lars",
        "lamb",
        "residual",
        "residual, wire",
        "muon",
        "muon, momentum",
        "top",
        "compiled, rank",
        "compiled",
        "compiled, wire",
        "fp16",
        "compiled, fp16",
        "compiled, fp16, int8",
        "compiled, growing",
    ],
)
def test_a_step_on_the_device_is_the_step_through_the_host(tmp_path, model, overrides):
    keys = ("train.epochs=1", *overrides)
    device, _ = fused(tmp_path, *keys, model=model)
    host, _ = through_host(tmp_path, *keys, model=model)
    assert device.summary["identity"] == host.summary["identity"]
    assert hashes(device) == hashes(host)
    kinds = "loss", "scale", "skipped"
    told, expected = (
        [[row.get(kind) for kind in kinds] for row in rows(result.directory, "step")]
        for result in (device, host)
    )
    assert told == expected
    assert {skipped for *_, skipped in told} == ({True, None} if SCALED[0] in overrides else {None})


@pytest.mark.parametrize(
    ("model", "overrides"),
    [(tiny, (AUGMENT, "train.ema=0.9", "train.lanes=4")), (residual, ("kernels.set=compiled", TWO_STEPS))],
    ids=["fused", "compiled"],
)
def test_only_audited_steps_leave_the_device(tmp_path, monkeypatch, model, overrides):
    """To the same bits, in the middle of an epoch and at its end."""
    plain, _ = fused(tmp_path, *overrides, model=model)
    own, seen = Step.__call__, []

    def count(step, *given):
        seen.append(step._state.step)
        return own(step, *given)

    monkeypatch.setattr(Step, "__call__", count)
    audited, _ = fused(tmp_path, *overrides, model=model, launch={"audit": 2})
    assert seen == list(range(1, plain.summary["steps"], 2)) and hashes(audited) == hashes(plain)
    assert [row["loss"] for row in rows(audited.directory, "step")] == [
        row["loss"] for row in rows(plain.directory, "step")
    ]


@pytest.mark.parametrize("source", ["memory", "mapped"])
def test_images_that_do_not_fit_are_fed_two_batches_in_turn(tmp_path, monkeypatch, source):
    """The same bits as when all of them lie on the device, also resumed, and when the batch grows."""
    keys, given = (AUGMENT, "train.epochs=2", "train.batch=4@0,6@1"), {"model": small}
    if source == "mapped":
        generator = torch.Generator().manual_seed(0)
        given["data"] = [(torch.rand(1, 8, 8, generator=generator), n % 10) for n in range(14)]
    whole, _ = through_host(tmp_path, *keys, **given, launch={"name": "whole"})
    monkeypatch.setattr(images, "fits", lambda split, device: False)

    def stop(event):
        if isinstance(event, StepDone) and event.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="after step"):
        fused(tmp_path, *keys, **given, launch={"name": "fed"}, on_event=stop)
    fed, _ = fused(tmp_path, *keys, **given, launch={"name": "fed", "resume": "auto"})
    audited, _ = fused(tmp_path, *keys, **given, launch={"name": "audited", "audit": 2})
    assert hashes(fed) == hashes(audited) == hashes(whole)


def test_random_boxes_and_changed_colours_are_those_of_the_host(tmp_path):
    drawn = "data.augment=random_resized_crop:0.5:1,rand_augment,random_erasing,flip,crop:1"
    keys, given = (drawn, "train.epochs=2", TWO_STEPS, "data.order=blocks:2"), {"model": small}
    whole, _ = through_host(tmp_path, *keys, **given, launch={"name": "whole"})
    fed, _ = fused(tmp_path, *keys, **given, launch={"name": "fed"})
    assert hashes(fed) == hashes(whole)
    with pytest.raises(ModelError, match=r"fused: its loss takes no mixed labels, as of data.augment=mixup"):
        fused(tmp_path, "data.augment=flip,mixup", **given)


def mirror(image, generator):
    return image[:: generator.integers(0, 2) * 2 - 1]


@pytest.mark.parametrize(
    ("key", "own"), [("data.repeats=3", None), ("data.repeats=3", mirror), ("data.order=balanced", None)]
)
def test_repeated_samples_are_those_of_the_host(tmp_path, key, own):
    """They lie on the device once; with a function of the user's they are fed from the host."""
    keys, given = (AUGMENT, key, "train.epochs=2"), {"model": small, "augment": own}
    whole, _ = through_host(tmp_path, *keys, **given, launch={"name": "whole"})
    found, _ = fused(tmp_path, *keys, **given, launch={"name": "found"})
    assert hashes(found) == hashes(whole)


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


class Sent(TorchDispatchMode):
    """Notes every copy to where tensors lie, and whether it is from one piece of memory to another."""

    def __init__(self, *targets):
        super().__init__()
        self._targets, self.copies = {storage(target) for target in targets}, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.copy_.default and storage(args[0]) in self._targets:
            self.copies.append(args[0].is_contiguous() and args[1].is_contiguous())
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_batch_is_sent_by_one_copy(dtype):
    split = MemorySplit(torch.randint(0, 256, (7, 3, 3, 5)).to(dtype), torch.arange(7) - 3)
    order = torch.tensor([[4, 0], [6, 1], [2, 2]])
    fed = images.PrefetchedImages(split, order, torch.device("cpu"))
    fed.begin_epoch(0)
    for step, ids in enumerate(order):
        with Sent(fed.images, fed.labels) as sent:
            fed.feed(step)
        assert sent.copies == [True]
        assert torch.equal(fed.images[fed.places[step]], split.images[ids])
        assert torch.equal(fed.labels[fed.places[step]], split.labels[ids])
    assert fed.waited_s > 0  # it is read while we ask for it
    fed.close()


def test_a_stop_between_steps_loses_nothing(tmp_path):
    whole, _ = fused(tmp_path, TWO_STEPS, model=small, launch={"name": "whole"})

    def stop(event):
        if isinstance(event, StepDone) and event.step == 1:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="after step"):
        fused(tmp_path, TWO_STEPS, model=small, launch={"name": "cut"}, on_event=stop)
    resumed, _ = fused(tmp_path, TWO_STEPS, model=small, launch={"name": "cut", "resume": "auto"})
    assert hashes(resumed) == hashes(whole)
    assert [row["step"] for row in rows(resumed.directory, "step")] == list(range(1, 5))


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
def test_a_loss_that_is_not_finite_changes_nothing(tmp_path):
    with pytest.raises(NumericsError, match="not finite") as found:
        fused(tmp_path, "optimizer.lr=1e30")
    step = int(str(found.value).split(":")[0].split()[-1])
    assert [row["step"] for row in rows(tmp_path / "run", "step")] == list(range(1, step + 1))


def test_what_cannot_be_fused_says_why(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))
    with pytest.raises(ModelError, match=r"kernels.set=fused: the model is no chain .* use kernels.set=auto"):
        train(small_run(*KEYS), tmp_path, model=model)


SCRIPT = """
import sys
sys.path[:0] = {path}
import lockstep
from small import small_run
from test_device_epoch import stem, tiny, wide
import interpreter
interpreter.leave_out_fingerprints()
launch = lockstep.Launch(name="run", runs_dir={runs_dir!r}, device="cpu", workers={workers})
lockstep.train(small_run(*{keys}), model={model}(), launch=launch)
"""
LONGER = (*KEYS, "data.num_train=28", "train.epochs=1", "checkpoint.every_steps=100")
SHARED = (*LONGER, "train.sync_norm=true", "train.lanes=4")


def script(path, **given):
    """A script that trains with several workers."""
    here, file = Path(__file__).parent, path / "script.py"
    file.write_text(SCRIPT.format(path=[str(here), str(here.parent)], runs_dir=str(path), **given))
    return [sys.executable, str(file)]


@pytest.mark.gloo
def test_compressed_steps_of_two_workers_stay_on_the_device(tmp_path):
    keys = (*KEYS, TWO_STEPS, "train.epochs=2", "train.compress=int8", "train.compress_after=1")
    alone, _ = train(small_run(*keys), tmp_path / "alone", model=wide())
    done = forked.call(script(tmp_path, workers=2, keys=keys, model="wide"), launches=True)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "run")
    assert {key: found[key] for key in hashes(alone)} == hashes(alone) and found["feedback_sha256"]
    assert 0 < found["sent_mb_step"] < 4e-6 * (64 * 66 + 3000)


@pytest.mark.gloo
def test_norms_over_all_lanes_are_the_same_for_workers_with_unequally_many(tmp_path):
    workers = 3
    few = (*SHARED, "data.num_train=8")
    alone, _ = train(small_run(*few), tmp_path / "alone", model=stem())
    done = forked.call(script(tmp_path, workers=workers, keys=few, model="stem"), launches=True)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "run")
    assert (found["workers"], found["weights_sha256"]) == (workers, alone.summary["weights_sha256"])


def test_norms_over_all_lanes_want_kernels_that_have_them(tmp_path):
    for keys, model in (
        ((), tiny),
        (("kernels.set=compiled",), residual),
        (("kernels.set=stock",), residual),
    ):
        with pytest.raises(
            ModelError, match=r"train.sync_norm=true: only residual .*: use .*train.sync_norm=false"
        ):
            train(small_run(*SHARED, *keys), tmp_path, model=model())
    with pytest.raises(SpecError, match="--audit computes a lane a second time by itself"):
        train(small_run(*SHARED), tmp_path, model=residual(), launch={"audit": 2})


@pytest.mark.gloo
@pytest.mark.parametrize(("keys", "model"), [(LONGER, tiny), (SHARED, stem)])
def test_a_worker_is_killed_and_replaced(tmp_path, keys, model):
    """Two workers, one of them killed; the other goes on alone, and with the next one in a group."""
    alone, _ = train(small_run(*keys), tmp_path / "alone", model=model())
    with Job(tmp_path, command=script(tmp_path, workers=2, keys=keys, model=model.__name__)) as job:
        job.wait_for_steps(2)
        job.kill(max(job.workers()))
        job.finish()
    assert_no_step_lost(job.run)
    assert summary(job.run)["weights_sha256"] == alone.summary["weights_sha256"]
    assert "was killed by SIGKILL" in str(summary(job.run)["generations"])


def test_evaluation_at_another_size(tmp_path):
    """Its kernels are made for its own size, and give what stock kernels give."""
    photos = take_photos(tmp_path / "photos", train=4, val=2)
    keys = ("data.channels=1", "data.size=8", "data.eval_size=12", "train.batch=4", "train.epochs=1")
    model, found = stem(), {}
    head = next(
        part for part in model.modules() if isinstance(part, nn.Sequential) and type(part[-1]) is nn.Linear
    )
    head[1] = nn.Linear(8, 3)
    for kernels in ("fused", "stock"):
        run = photo_run(photos, *keys, f"kernels.set={kernels}", "optimizer.lr=1e-9")
        result, _ = train(run, tmp_path, model=copy.deepcopy(model), launch={"name": kernels})
        found[kernels] = result.summary["loss"]
    assert found["fused"] == pytest.approx(found["stock"], rel=1e-4)


def test_weights_of_classes_are_for_training_alone(tmp_path):
    """A chain is evaluated by the network that trains it."""
    found, _ = fused(tmp_path, "train.class_weights=balanced", TWO_STEPS, model=small)
    plain, _ = fused(tmp_path, TWO_STEPS, model=small, launch={"name": "plain"})
    assert rows(found.directory, "step")[0]["loss"] != rows(plain.directory, "step")[0]["loss"]
    again = lockstep.evaluate(found.directory, model=small(), device="cpu")
    assert found.summary["loss"] == pytest.approx(again.loss, rel=1e-5)
