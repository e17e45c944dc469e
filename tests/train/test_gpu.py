"""What only a GPU can show: the same bits run after run and resumed, for every precision and layout."""

import json
import os
import subprocess
import sys

import pytest
import torch
from small import OVERRIDES, call, small_run, summary, train, train_command

import lockstep
from lockstep.comm.group import Group
from lockstep.data import open_data
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.runs.event import StepDone
from lockstep.train.device import prefetch as images
from lockstep.train.engine import Engine
from lockstep.train.evaluation.evaluate import evaluate_trained
from lockstep.train.setup import set_up

pytestmark = pytest.mark.gpu

CASES = {
    "lenet5": ("train.batch=128", "train.lanes=4"),
    "emotion48": (
        "model.name=emotion48",
        "model.dropout=0.3",
        "data.augment=flip,crop,cutout",
        "train.ema=0.9",
    ),
    "resnet18": (
        "model.name=resnet18",
        "train.precision=bf16",
        "train.channels_last=true",
        "train.clip=1.0",
        "kernels.set=stock",
    ),
    "googlenet": ("model.name=googlenet", "optimizer.lr=0.001", "train.batch=64"),
    "alexnet": ("model.name=alexnet", "data.size=64", "optimizer.lr=0.001"),
}

FUSED = (*CASES["emotion48"], "train.precision=bf16", "data.size=48", "train.clip=1.0")
RESIDUAL = (*CASES["resnet18"], "data.size=32", "kernels.set=fused", "train.ema=0.9")
SHARED = (*RESIDUAL, "train.sync_norm=true")


@pytest.mark.parametrize(
    "keys", [*CASES.values(), FUSED, RESIDUAL, SHARED], ids=[*CASES, "fused", "residual", "sync_norm"]
)
def test_the_same_bits_again_and_resumed(keys, tmp_path):
    run = small_run(*keys)
    on_gpu = {"device": "cuda"}
    one, _ = train(run, tmp_path / "one", launch=on_gpu)
    two, _ = train(run, tmp_path / "two", launch=on_gpu)

    def stop(event):
        if getattr(event, "step", 0) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(run, tmp_path / "three", launch=on_gpu, on_event=stop)
    three, _ = train(run, tmp_path / "three", launch={**on_gpu, "resume": "auto"})
    hashes = {result.summary["weights_sha256"] for result in (one, two, three)}
    assert len(hashes) == 1 and one.summary["device"] == torch.cuda.get_device_name()


RULED = {
    "muon": ("optimizer.name=muon", "optimizer.weight_decay=0.1"),
    "lars": ("optimizer.name=lars", "optimizer.lr=2", "optimizer.weight_decay=0.01"),
    "lamb": ("optimizer.name=lamb", "optimizer.lr=0.01", "optimizer.weight_decay=0.01"),
    **{kind: (f"train.compress={kind}",) for kind in ("bf16", "int8", "fp8", "top:0.01", "rank:4")},
}


@pytest.mark.parametrize("rule", RULED)
@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_steps_on_the_device_are_those_through_the_host(kernels, rule, tmp_path, monkeypatch):
    keys = (*CASES["resnet18"], *RULED[rule], "data.size=32", f"kernels.set={kernels}", "train.epochs=1")
    found = []
    for way in ("device", "host"):
        result, _ = train(small_run(*keys), tmp_path / way, launch={"device": "cuda"})
        found.append({key: value for key, value in result.summary.items() if key.endswith("sha256")})
        monkeypatch.setattr(Engine, "_make_device_epochs", lambda engine: None)
    assert found[0] == found[1]


def test_a_model_of_timm_trains_to_the_same_bits(tmp_path):
    pytest.importorskip("timm")
    run = small_run("model.name=timm:resnet18", "data.size=32", "train.epochs=1")
    one, _ = train(run, tmp_path / "one", launch={"device": "cuda"})
    two, _ = train(run, tmp_path / "two", launch={"device": "cuda"})
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]


def test_out_of_memory_says_what_would_help(tmp_path):
    from lockstep.errors import OutOfMemory

    class Hungry(torch.nn.Sequential):
        def forward(self, x):
            if self.training:
                torch.empty(1 << 50, device=x.device)
            return super().forward(x.flatten(1))

    with pytest.raises(OutOfMemory, match=r"raise train\.lanes"):
        model = Hungry(torch.nn.Linear(256, 10))
        train(small_run(), tmp_path, model=model, launch={"device": "cuda"})


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["lenet5", "resnet18", "googlenet"])
def test_workers_that_share_a_gpu_train_to_the_same_bits(name, wire, tmp_path):
    found = set()
    for workers in (1, 2, 4):
        folder = tmp_path / str(workers)
        command = train_command(folder, overrides=(*CASES[name], "train.epochs=1", f"train.wire={wire}"))
        command[command.index("cpu")] = "cuda"
        done = call([*command, "--workers", str(workers)])
        assert done.returncode == 0, done.stderr
        found.add(tuple(summary(folder / "run")[key] for key in ("weights_sha256", "loss", "accuracy")))
        assert summary(folder / "run")["backend"] == ("gloo" if workers > 1 else "none")
    assert len(found) == 1


def test_nccl_trains_to_the_same_bits(tmp_path):
    """One GPU for both workers: each is told that it is a host of its own, so that NCCL does not refuse."""
    alone = train_command(tmp_path / "alone")
    alone[alone.index("cpu")] = "cuda"
    assert call(alone).returncode == 0
    both = train_command(tmp_path, "--backend", "nccl")
    both[both.index("cpu")] = "cuda"
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    workers = [
        subprocess.Popen(both, env={**os.environ, **world, "RANK": rank, "NCCL_HOSTID": f"host{rank}"})
        for rank in ("0", "1")
    ]
    assert [worker.wait(timeout=55) for worker in workers] == [0, 0]
    found, expected = summary(tmp_path / "run"), summary(tmp_path / "alone" / "run")
    assert found["backend"] == "nccl" and found["weights_sha256"] == expected["weights_sha256"]


ELASTIC = """
import os, signal, time, lockstep
from pathlib import Path
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.spec.world import read_world
from lockstep.train.step import Step

world, backend, mark = read_world(os.environ), os.environ["BACKEND"], Path("killed")
if world:
    os.environ["NCCL_HOSTID"] = f"host{world.name}"
step = Step.__call__
def dies(self, lanes, *wishes):
    if world.name == "1" and self._state.step == 7 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if self._mesh.world.size == 1:
        time.sleep(0.2)  # until the other is replaced
    return step(self, lanes, *wishes)
Step.__call__ = dies
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides(KEYS)))
launch = lockstep.Launch(name="run", runs_dir=Path(), device="cuda", workers=2, backend=backend)
lockstep.train(run, launch=launch, on_event=print)
"""


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_killed_worker_is_replaced_and_the_bits_are_the_same(backend, tmp_path):
    keys = [*OVERRIDES, "train.epochs=4"]
    path = tmp_path / "elastic.py"
    path.write_text(ELASTIC.replace("KEYS", repr(keys)))
    done = call([sys.executable, str(path)], cwd=tmp_path, env={**os.environ, "BACKEND": backend})
    assert done.returncode == 0, done.stderr
    alone = train_command(tmp_path / "alone", overrides=("train.epochs=4",))
    alone[alone.index("cpu")] = "cuda"
    assert call(alone).returncode == 0
    found, expected = summary(tmp_path / "run"), summary(tmp_path / "alone" / "run")
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert [row["workers"] for row in found["generations"]] == [2, 1, 2], found["generations"]


COMPILED = ("train.precision=bf16", "kernels.set=compiled", "data.num_train=200")
NORMED = (*CASES["resnet18"], *COMPILED, "data.size=32")
GROUPED = (*COMPILED, "model.name=alexnet", "data.size=64")  # with dropout


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("keys", [FUSED, RESIDUAL, SHARED], ids=["emotion48", "resnet18", "sync_norm"])
def test_whole_steps_on_the_device_are_the_same_bits_however_they_run(keys, wire, tmp_path):
    compare_ways((*keys, f"train.wire={wire}"), tmp_path)


@pytest.mark.parametrize("keys", [NORMED, GROUPED], ids=["resnet18", "alexnet"])
def test_compiled_steps_are_the_same_bits_however_they_run(keys, tmp_path):
    """With one wire: each number of lanes is compiled, which takes half a minute."""
    compare_ways(keys, tmp_path)


@pytest.mark.parametrize("name", ["googlenet", "resnet50"])
def test_compiled_steps_of_large_models_are_the_same_bits_across_workers(name, tmp_path):
    """Of two lanes, so that two numbers of them are compiled; with auxiliary heads, with wide batch norms."""
    keys = (*COMPILED, f"model.name={name}", "data.size=32", "data.num_train=96", "optimizer.lr=0.001")
    ways = {"alone": (), "2 workers": ("--workers", "2")}
    compare_runs((*keys, "train.lanes=2", "train.epochs=1"), ways, tmp_path)


TIMM = ("efficientnet_b0", "convnext_atto", "mobilenetv3_small_100", "regnety_004")


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("name", TIMM)
def test_compiled_steps_of_timms_models_are_the_same_bits_across_workers(name, precision, tmp_path):
    """With stochastic depth; by their own modules, traced; fp32 and tf32 are compiled by `auto`."""
    pytest.importorskip("timm")
    keys = (f"model.name=timm:{name}", "model.drop_path_rate=0.2", f"train.precision={precision}")
    keys += ("data.num_train=96", "data.size=64", "train.lanes=2", "train.epochs=1", "optimizer.lr=0.001")
    compare_runs(keys, {"alone": (), "2 workers": ("--workers", "2")}, tmp_path)
    told = json.loads((tmp_path / "alone" / "run" / "identity.json").read_text())
    assert told["kernels.set"] == "compiled"


def compare_ways(keys, tmp_path):
    ways = {"graph": (), "launches": ("--no-graph",)}
    if "train.sync_norm=true" not in keys:  # there no lane can be audited by itself
        ways |= {"host": ("--audit", "1"), "audited": ("--audit", "3")}
    ways |= {f"{n} workers": ("--workers", str(n)) for n in (2, 3, 4)}
    compare_runs(keys, ways, tmp_path)


def compare_runs(keys, ways, tmp_path):
    found = {}
    for name, flags in ways.items():
        command = train_command(tmp_path / name, overrides=keys)
        command[command.index("cpu")] = "cuda"
        done = call([*command, *flags], timeout=400)  # the first one compiles
        assert done.returncode == 0, (name, done.stderr)
        told = summary(tmp_path / name / "run")
        found[name] = tuple(told[key] for key in ("weights_sha256", "loss", "accuracy"))
    assert len(set(found.values())) == 1, found


AUTO = {
    "emotion48": "fused",
    "resnet18": "fused",
    "googlenet": "compiled",
    "timm:resnet18": "compiled",
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_is_a_lookup(name):
    if ":" in name:
        pytest.importorskip("timm")
    for precision, expected in (("bf16", AUTO[name]), ("fp32", "compiled")):
        run = small_run(f"model.name={name}", f"train.precision={precision}", "data.size=48")
        with plain_torch():
            setup = set_up(run, prepare_device("cuda", run.train.threads))
        hopper = torch.cuda.get_device_capability() >= (9, 0)
        wanted = expected if hopper or name != "resnet18" else "compiled"
        assert setup.identity["kernels.set"] == wanted, (name, precision)


def test_steps_on_the_device_allocate_nothing(tmp_path):
    """Between two steps in the middle of an epoch the allocator's own counters stand still."""
    counts = []

    def watch(event):
        if isinstance(event, StepDone) and event.step_in_epoch > 1:
            counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])

    run = small_run(*FUSED, "data.num_train=2048", "train.epochs=1", "checkpoint.every_steps=1000")
    train(run, tmp_path, launch={"device": "cuda"}, on_event=watch)
    middle = counts[: len(counts) // 2]
    assert len(middle) > 20 and len(set(middle)) == 1


def test_images_that_do_not_fit_train_to_the_same_bits(tmp_path, monkeypatch):
    found = set()
    for fits in (True, False):
        monkeypatch.setattr(images, "fits", lambda split, device, fits=fits: fits)
        result, _ = train(small_run(*FUSED), tmp_path / str(fits), launch={"device": "cuda"})
        found.add(result.summary["weights_sha256"])
    assert len(found) == 1


KINDS = "emotion48", "resnet18", "resnet18, compiled", "alexnet, compiled"


@pytest.mark.parametrize("keys", [FUSED, RESIDUAL, NORMED, GROUPED], ids=KINDS)
def test_evaluation_as_a_graph_is_the_same_bits_and_allocates_nothing(keys, monkeypatch):
    """As launch by launch, and when the images do not fit; the allocator's counters stand still."""
    run, found = small_run(*keys, "data.num_test=500"), []

    def watch(feed, counts):
        def watched(group):
            counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
            feed(group)

        return watched

    with plain_torch():
        setup = set_up(run, prepare_device("cuda", run.train.threads))
        for graph, fits in ((True, True), (False, True), (True, False)):
            monkeypatch.setattr(images, "fits", lambda split, device, fits=fits: fits)
            evaluator, counts = setup.evaluator(Group(), graph), []
            found.append(evaluator(setup.model))
            source = evaluator.blocks.images
            monkeypatch.setattr(source, "feed", watch(source.feed, counts))
            found.append(evaluator(setup.model))
            assert len(counts) == evaluator.blocks.groups > 8 and (not graph or len(set(counts)) == 1)
    assert len(set(found)) == 1


@pytest.mark.parametrize("keys", [FUSED, RESIDUAL, NORMED, GROUPED], ids=KINDS)
def test_a_trained_run_is_used_as_it_was_trained(keys, tmp_path):
    """Evaluation has the loss of training; a predictor, as graphs, the probabilities of the model."""
    result, _ = train(small_run(*keys, "train.epochs=1"), tmp_path, launch={"device": "cuda"})
    predictor = lockstep.predictor(result.directory, device="cuda")
    model, trained = lockstep.load(result.directory), predictor._trained
    evaluation = evaluate_trained(trained, open_data(trained.run).test)
    assert (evaluation.loss, evaluation.accuracy) == (result.summary["loss"], result.summary["accuracy"])
    every = []
    for size in (1, 3, 130, 3):  # a residual network takes fused kernels for the most of them
        images = torch.randint(0, 256, (size, *trained.shape), dtype=torch.uint8)
        expected = model(trained.augment.normalize(images)).softmax(1)
        with torch.inference_mode(size == 1):
            found = predictor(images)
        assert torch.equal(found, predictor(images.cuda()))
        assert torch.allclose(found.cpu(), expected, atol=2e-3)
        every.append(found)
    assert len(predictor._runs) == 3 and len(torch.cat(every).unique(dim=0)) > 130
    assert not torch.equal(*every[2][-2:])  # the last ones, of a box that is not full
