import io
import json
import re
import signal
import sys
import time
import tomllib
import warnings
from dataclasses import replace

import pytest
import torch
from small import rows, small_run, summary, train
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.cli.watch.progress import Progress
from lockstep.data import open_data
from lockstep.errors import DataError, IdentityError, Interrupted, ModelError, NumericsError, OutOfMemory
from lockstep.kernels.numerics import plain_torch
from lockstep.runs.event import CheckpointSaved, EpochDone, Finished, Notice, Started, StepDone
from lockstep.runs.trained_run import check_same_data, open_trained
from lockstep.spec.run_file import dump_toml


def test_a_run_leaves_everything_in_its_directory(tmp_path):
    result, events = train(small_run(), tmp_path, by=lockstep.train)
    assert result.directory == tmp_path / "run"
    names = {path.name for path in result.directory.iterdir()}
    assert names >= {"run.toml", "identity.json", "metrics.jsonl", "summary.json", "curves.png"}
    assert (result.directory / "run.toml").read_text() == dump_toml(small_run())
    assert summary(result.directory) == result.summary
    kinds = [type(event) for event in events]
    assert kinds[0] is Started and kinds[-1] is Finished
    assert kinds.count(StepDone) == 20 and kinds.count(EpochDone) == 2


def test_every_position_is_used_once_an_epoch(tmp_path):
    result, _ = train(small_run(), tmp_path)
    for epoch in range(2):
        used = [row["positions"] for row in rows(result.directory, "step") if row["epoch"] == epoch]
        assert used == [[32 * step, 32 * (step + 1)] for step in range(10)]


class Slow(torch.utils.data.Dataset):
    """Sixteen images that take `seconds` each to decode."""

    seconds = 0.0

    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((1, 8, 8), index / 16), index % 10


def test_an_epoch_tells_its_own_pace_and_the_summary_the_mean_and_the_waiting(tmp_path):
    run = small_run("train.batch=4", "train.lanes=2", "train.epochs=2", "checkpoint.every_steps=100")
    test = torch.utils.data.TensorDataset(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    data, events = Slow(), []

    def note(event):
        events.append(event)
        data.seconds = {Started: 0.1, EpochDone: 0.0}.get(type(event), data.seconds)

    result, _ = train(run, tmp_path, model=model, data=(data, test), on_event=note)
    first, second = (event for event in events if isinstance(event, EpochDone))
    seconds = [4 / event.img_s for event in events if isinstance(event, StepDone)]
    assert first.img_s == pytest.approx(16 / sum(seconds[:4])) and first.img_s < 20
    assert second.img_s == pytest.approx(16 / sum(seconds[4:])) and second.img_s > first.img_s
    assert result.summary["img_s"] == pytest.approx(32 / sum(seconds))
    waited_s = first.wait_share * sum(seconds[:4]), second.wait_share * sum(seconds[4:])
    assert first.wait_share > 0.5 and waited_s[0] > waited_s[1] >= 0
    assert result.summary["data_wait_s"] == pytest.approx(sum(waited_s), abs=1e-4)
    assert result.summary["data_wait_step_s"] == pytest.approx(sum(waited_s) / 8, abs=1e-4)
    share = result.summary["data_wait_share"]
    assert share == pytest.approx(sum(waited_s) / sum(seconds), abs=1e-3) and share > 0.2
    noted = [row["data_wait_s"] for row in rows(result.directory, "step")]
    assert sum(noted) == pytest.approx(sum(waited_s), abs=1e-4)
    shown = io.StringIO()
    with Progress(shown) as progress:
        for event in events:
            progress(replace(event, wait_share=0.1) if event is second else event)
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("epoch")]
    assert f"img/s, {100 * first.wait_share:.0f} % waiting for data" in lines[0] and "waiting" not in lines[1]
    told = f"{100 * share:.0f} % of the time was spent waiting for data: `lockstep data pack`"
    assert told in shown.getvalue()


def test_a_name_that_exists_gets_a_suffix(tmp_path):
    first, _ = train(small_run("train.epochs=1"), tmp_path)
    second, _ = train(small_run("train.epochs=1"), tmp_path)
    assert [first.directory.name, second.directory.name] == ["run", "run-2"]
    assert first.summary["weights_sha256"] == second.summary["weights_sha256"]


@pytest.mark.parametrize("override", ["seed=1", "train.lanes=8", "optimizer.lr=0.06", "train.clip=0.1"])
def test_what_belongs_to_the_identity_changes_bits_and_identity(tmp_path, override):
    one, _ = train(small_run("train.epochs=1"), tmp_path)
    other, _ = train(small_run("train.epochs=1", override), tmp_path)
    assert one.summary["identity"] != other.summary["identity"]
    assert one.summary["weights_sha256"] != other.summary["weights_sha256"]


@pytest.mark.parametrize("override", ["checkpoint.every_steps=1", "checkpoint.keep=1"])
def test_where_checkpoints_fall_changes_nothing(tmp_path, override):
    one, _ = train(small_run("train.epochs=1"), tmp_path)
    other, _ = train(small_run("train.epochs=1", override), tmp_path)
    assert one.summary["identity"] == other.summary["identity"]
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.name=resnet18", "train.batch=16", "data.num_train=40", "data.num_test=16"),
        ("model.name=googlenet", "train.batch=16", "data.num_train=40", "optimizer.lr=0.001"),
        ("model.name=emotion48", "model.dropout=0.5", "data.augment=flip,crop,cutout", "train.ema=0.9"),
        ("train.precision=bf16", "train.channels_last=true"),
        ("train.loss=squared_error", "optimizer.name=adamw", "optimizer.lr=0.001", "schedule.name=step"),
    ],
    ids=lambda value: value[0],
)
def test_the_same_run_twice_gives_the_same_bits(tmp_path, overrides):
    torch.manual_seed(1)
    one, _ = train(small_run("train.epochs=1", *overrides), tmp_path)
    torch.manual_seed(2)  # the caller's stream must not matter
    other, _ = train(small_run("train.epochs=1", *overrides), tmp_path)
    timed = ("img_s", "data_wait_s", "data_wait_step_s", "data_wait_share", "generations")
    assert {k: v for k, v in one.summary.items() if k not in timed} == {
        k: v for k, v in other.summary.items() if k not in timed
    }


def test_a_result_prints_as_one_line(tmp_path):
    result, _ = train(small_run("train.epochs=1"), tmp_path)
    accuracy, weights = 100 * result.summary["accuracy"], result.summary["weights_sha256"]
    expected = f"Result('{tmp_path / 'run'}', accuracy {accuracy:.2f} %, weights_sha256 {weights})"
    assert str(result) == repr(result) == expected


def test_training_leaves_the_callers_random_stream_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(small_run("train.epochs=1"), tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_bf16_trains_on_its_own_weights(tmp_path):
    """Autocast once kept the casts of the first weights, and no loss ever moved."""
    losses = {}
    for precision in ("fp32", "bf16"):
        result, _ = train(small_run(f"train.precision={precision}"), tmp_path)
        losses[precision] = [row["loss"] for row in rows(result.directory, "step")]
        assert len({row["test_loss"] for row in rows(result.directory, "epoch")}) == 2
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.1)
    assert losses["bf16"][0] != pytest.approx(losses["bf16"][-1], abs=0.01)


def test_averaged_weights_are_what_is_evaluated(tmp_path):
    result, _ = train(small_run("train.ema=0.99"), tmp_path)
    averaged = lockstep.load(result.directory)
    assert "ema_sha256" in result.summary
    assert not torch.equal(averaged.state_dict()["blocks.classifier.weight"],
                           result.model.state_dict()["blocks.classifier.weight"])  # fmt: skip


def test_own_module_data_and_loss(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 3, 8, 8), dtype=torch.uint8, generator=generator)
    data = [(image, index % 3) for index, image in enumerate(images)]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))

    def loss(logits, labels):
        return nn.functional.cross_entropy(logits, labels) * 2

    before = module[1].weight.clone()
    run = small_run("train.batch=16", "train.epochs=1")
    result, _ = train(run, tmp_path, lockstep.train, model=module, data=data, loss=loss)
    assert result.model is module and not torch.equal(module[1].weight, before)
    with pytest.raises(ModelError, match="module of your own"):
        lockstep.load(result.directory)
    again = lockstep.load(result.directory, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    assert torch.equal(again[1].weight, module[1].weight)
    with pytest.raises(IdentityError, match=r"by a script .*Launch\(resume="):
        train(run, tmp_path, launch={"resume": "auto"})


def test_a_run_is_evaluated_by_name_unless_its_data_is_of_a_script(tmp_path):
    run = small_run("train.epochs=1")
    own = [(torch.zeros(1, 16, 16, dtype=torch.uint8), index % 10) for index in range(64)]
    loss, _ = train(run, tmp_path / "loss", loss=nn.CrossEntropyLoss())
    data, _ = train(run, tmp_path / "data", data=own)
    named = open_data(run)
    trained = open_trained(tmp_path, str(loss.directory), device="cpu")
    assert not check_same_data(trained, named)
    trained.identity["manifest.decoder"] = "pillow 1"
    assert "decoded by other libraries in training" in check_same_data(trained, named)
    trained.identity["manifest.train_sha256"] = "another"
    with pytest.raises(DataError, match=r"was trained on other data .*train_sha256"):
        check_same_data(trained, named)
    with pytest.raises(DataError, match="was trained on data of your own: hand it to"):
        check_same_data(open_trained(tmp_path, str(data.directory), device="cpu"), named)


@pytest.mark.parametrize("model", [nn.Linear, 3])
def test_what_is_no_module_is_refused(model, tmp_path):
    with pytest.raises(ModelError, match=r"is no module: give an instance of torch\.nn\.Module"):
        train(small_run(), tmp_path, model=model)


def test_a_loss_of_every_sample_is_refused(tmp_path):
    with pytest.raises(ModelError, match="the loss must be one number, the mean over its samples"):
        train(small_run(), tmp_path, loss=nn.CrossEntropyLoss(reduction="none"))


def test_a_module_that_does_not_fit_is_refused_before_any_work(tmp_path):
    for module in (nn.Linear(3, 3), nn.Sequential(nn.Flatten(), nn.Linear(256, 9))):
        with pytest.raises(ModelError):
            train(small_run(), tmp_path, model=module)
    assert not list(tmp_path.iterdir())


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"train\.batch=512 is more than the 330"):
        train(small_run("train.batch=512"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_small_lanes_with_batch_norm_are_warned_of(tmp_path):
    overrides = ("model.name=resnet18", "train.epochs=1", "data.num_train=40", "data.num_test=8")
    _, events = train(small_run(*overrides), tmp_path)
    assert any(isinstance(e, Notice) and e.warning and "8 samples a lane" in e.text for e in events)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path):
    with pytest.raises(NumericsError, match=r"step \d+: not finite: .*'blocks\."):
        train(small_run("optimizer.lr=1e30", "schedule.warmup_epochs=0"), tmp_path)
    manifests = sorted((tmp_path / "run" / "checkpoints").glob("*.json"))
    assert manifests and not (tmp_path / "run" / "summary.json").exists()


def test_out_of_memory_says_what_would_help(tmp_path):
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 10)

        def forward(self, x):
            if self.training:
                torch.empty(1 << 60, dtype=torch.uint8)
            return self.layer(x.flatten(1))

    for keys, fixes in (
        (
            (),
            "raise train.lanes=4 (smaller lanes), {}, use train.precision=bf16, set train.recompute=true, "
            "or {}",
        ),
        (("train.recompute=true",), "raise train.lanes=4 (smaller lanes), {}, or use train.precision=bf16"),
        (("train.bands=2", "train.precision=bf16"), "raise train.lanes=4 (smaller lanes), {}, or {}"),
        (
            ("train.batch=4", "train.local_steps=2"),
            "lower the image size, use train.precision=bf16, or set train.recompute=true",
        ),
    ):
        told = fixes.format(
            "lower train.batch=32 or the image size", "give the layers to several workers (--plan pipeline=2)"
        )
        with pytest.raises(OutOfMemory, match=f"a lane: {re.escape(told)}$"):
            train(small_run(*keys), tmp_path, model=nn.Sequential(nn.Sequential(Hungry())))


def test_a_bug_in_the_users_module_keeps_its_traceback(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 10)

        def forward(self, x):
            if self.training:
                raise RuntimeError("my own bug")
            return self.layer(x.flatten(1))

    with pytest.raises(ModelError, match="my own bug") as caught:
        train(small_run(), tmp_path, model=Broken())
    assert isinstance(caught.value.__cause__, RuntimeError) and not list(tmp_path.iterdir())


def test_a_callback_that_raises_stops_the_run_and_it_can_be_resumed(tmp_path):
    def stop(event):
        if isinstance(event, StepDone) and event.step == 7:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(small_run(), tmp_path, by=lockstep.train, on_event=stop)
    result, _ = train(small_run(), tmp_path, by=lockstep.train, launch={"resume": "auto"})
    whole, _ = train(small_run(), tmp_path / "whole")
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_checkpoints_are_pruned_but_the_best_stays(tmp_path):
    result, events = train(small_run("checkpoint.keep=2", "train.epochs=3"), tmp_path)
    kept = sorted(int(path.stem.split("-")[1]) for path in (result.directory / "checkpoints").glob("*.json"))
    assert set(kept) == {27, 30, result.summary["best_step"]}
    assert sum(isinstance(event, CheckpointSaved) for event in events) == 1 + 9 + 3


def test_a_finished_run_keeps_the_last_checkpoint_and_the_best(tmp_path):
    most = []

    def count(event):
        if isinstance(event, CheckpointSaved):
            most.append(len(list(event.path.parent.glob("*.json"))))

    result, _ = train(small_run("train.epochs=3"), tmp_path, on_event=count)
    kept = {int(path.stem.split("-")[1]) for path in (result.directory / "checkpoints").iterdir()}
    assert kept == {30, result.summary["best_step"]} and max(most) in (3, 4)
    again, _ = train(small_run("train.epochs=3"), tmp_path, launch={"resume": "auto"})
    assert again.summary == result.summary


def test_run_toml_reads_back(tmp_path):
    result, _ = train(small_run("train.epochs=1"), tmp_path)
    assert tomllib.loads((result.directory / "run.toml").read_text())["train"]["batch"] == 32
    identity = json.loads((result.directory / "identity.json").read_text())
    assert identity["numerics.probe"] and "data.dir" not in identity


def modes():
    """States of torch that a caller may be in."""
    yield torch.no_grad()
    yield torch.inference_mode()
    yield torch.autocast("cpu", torch.bfloat16)
    yield torch.device("meta")


def test_the_callers_torch_state_changes_nothing_and_comes_back(tmp_path):
    run = small_run("train.epochs=1")
    plain, _ = train(run, tmp_path)
    for mode in modes():
        with mode:
            result, _ = train(run, tmp_path, by=lockstep.train)
        assert result.summary["weights_sha256"] == plain.summary["weights_sha256"], mode
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    threads = torch.get_num_threads()
    try:
        result, _ = train(run, tmp_path)
        assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
        assert torch.get_default_dtype() == torch.float64 and torch.get_num_threads() == threads
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def torch_settings():
    """Every setting of torch that training makes, as it can be read."""
    matmul, found = torch.backends.cuda.matmul, {}
    for name, read in {
        "threads": torch.get_num_threads,
        "deterministic": torch.get_deterministic_debug_mode,
        "filled": lambda: torch.utils.deterministic.fill_uninitialized_memory,
        "flushed": lambda: sys.float_info.min / 2 == 0,
        "benchmark": lambda: torch.backends.cudnn.benchmark,
        "bf16": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "fp16": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "matmul": torch.get_float32_matmul_precision,
        "cudnn tf32": lambda: torch.backends.cudnn.allow_tf32,
        "matmul tf32": lambda: matmul.allow_tf32,
        "generic": lambda: torch.backends.fp32_precision,
        "cudnn conv": lambda: torch.backends.cudnn.conv.fp32_precision,
        "mkldnn conv": lambda: torch.backends.mkldnn.conv.fp32_precision,
        "warnings": lambda: list(warnings.filters),
    }.items():
        try:
            found[name] = read()
        except RuntimeError:  # set in the older and in the newer way
            found[name] = "torch does not tell"
    return found


def set_by_hand():
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_flush_denormal(True)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.set_float32_matmul_precision("medium")


def set_in_the_newer_way():
    torch.backends.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


@pytest.mark.parametrize("change", [lambda: None, set_by_hand, set_in_the_newer_way])
def test_the_callers_settings_come_back_and_training_has_its_own(tmp_path, change):
    within = []
    run, note = small_run("train.epochs=1"), lambda event: within.append(torch_settings())
    with plain_torch():  # gives everything back after this test
        torch.set_num_threads(2)
        change()
        before = torch_settings()
        result, _ = train(run, tmp_path, on_event=note)
        assert torch_settings() == before
        lockstep.predictor(result.directory, device="cpu")(torch.zeros(1, 1, 16, 16, dtype=torch.uint8))
        assert torch_settings() == before
    train(run, tmp_path, on_event=(plain := []).append)
    own = within[0]
    assert (own["generic"], own["mkldnn conv"], own["cudnn conv"]) == ("none", "none", "none")
    assert (own["matmul"], own["benchmark"], own["flushed"], own["threads"]) == ("highest", False, False, 1)
    assert result.summary["weights_sha256"] == plain[-1].summary["weights_sha256"]


def flat(scale=1.0, seed=0):
    torch.manual_seed(seed)

    class Flat(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * self.scale

    module = Flat(nn.Flatten(), nn.Linear(256, 10))
    module.scale = scale
    return module


def test_what_a_user_hands_over_is_in_the_identity(tmp_path):
    run = small_run("train.epochs=1")
    frozen = flat()
    frozen[1].bias.requires_grad_(False)
    smooth = nn.CrossEntropyLoss(label_smoothing=0.2)
    cases = [
        {"model": flat()},
        {"model": flat(scale=2.0)},
        {"model": flat(seed=1)},
        {"model": frozen},
        {"model": flat(), "loss": nn.CrossEntropyLoss()},
        {"model": flat(), "loss": smooth},
        {"model": flat(), "loss": lambda x, y: smooth(x, y) * 2},
    ]
    identities = [train(run, tmp_path, **case)[0].summary["identity"] for case in cases]
    assert len(set(identities)) == len(cases)
    assert train(run, tmp_path, model=flat())[0].summary["identity"] == identities[0]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: nn.functional.cross_entropy(x, y, reduction="none"),
        lambda x, y: nn.functional.cross_entropy(x, y)[None],
        lambda x, y: 1.0,
        lambda x, y: None,
        lambda x, y: nn.functional.cross_entropy(x, y).detach(),
    ],
)
def test_a_loss_that_is_no_mean_is_refused_before_any_work(tmp_path, loss):
    with pytest.raises(ModelError):
        train(small_run(), tmp_path, loss=loss)
    assert not list(tmp_path.iterdir())


class Heads(nn.Module):
    """A linear layer, one that nothing uses, and whatever is made of the first's output in training."""

    def __init__(self, give):
        super().__init__()
        self.linear, self.spare, self.give = nn.Linear(256, 10), nn.Linear(2, 2), give

    def forward(self, x):
        logits = self.linear(x.flatten(1))
        return self.give(self, logits) if self.training else logits


CUT = {
    "tuple": (lambda m, y: (y, y), "gives a tuple of 2 in training, and one loss is trained"),
    "list": (lambda m, y: [y], "gives a list of 1 in training"),
    "dict": (lambda m, y: {"logits": y}, "gives a dict of 1 in training"),
    "detached": (lambda m, y: y.detach(), "the model's output is cut off from its parameters"),
    "none": (lambda m, y: y.detach().requires_grad_() * 1, "on none of the model's 4 trainable parameters"),
}


@pytest.mark.parametrize("case", CUT)
def test_outputs_that_would_not_train_as_meant_are_refused(tmp_path, case):
    give, message = CUT[case]
    with pytest.raises(ModelError, match=message):
        train(small_run(), tmp_path, model=Heads(give))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x, y: F.cross_entropy(x, y).detach(), "the loss is cut off from the model's output"),
        (lambda x, y: torch.tensor(F.cross_entropy(x, y).item(), requires_grad=True), "the loss is cut off"),
        (lambda x, y: F.cross_entropy(x, y).item(), "the loss gives a float: it must give a tensor"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(tmp_path, loss, message):
    with pytest.raises(ModelError, match=message):
        train(small_run(), tmp_path, loss=loss)


def test_heads_with_a_weight_are_trained_and_unused_parameters_are_warned_of(tmp_path):
    model = Heads(lambda m, y: (y, 2 * y))
    model.aux_weight = 0.5
    _, events = train(small_run("train.epochs=1"), tmp_path, model=model)
    warning, *_ = [event.text for event in events if isinstance(event, Notice) and event.warning]
    assert warning.startswith("the loss does not depend on 'spare.weight', 'spare.bias': only weight decay")
    assert isinstance(events[-1], Finished)


def test_batch_norm_over_one_value_is_refused_before_any_work(tmp_path):
    with pytest.raises(ModelError, match="more than 1 value"):
        train(small_run("model.name=resnet18", "data.size=8", "train.batch=4"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_script_that_is_stopped_is_told_how_to_go_on(tmp_path):
    def stop(event):
        if getattr(event, "step", 0) == 3:
            signal.raise_signal(signal.SIGTERM)

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 10))
    with pytest.raises(Interrupted, match=r"the same script and lockstep\.Launch\(resume=\"(.*)\"\)") as told:
        train(small_run(), tmp_path, model=model, on_event=stop)
    again = str(told.value).rpartition('resume="')[2].removesuffix('")')
    result, _ = train(small_run(), tmp_path, model=model, launch={"resume": again})
    assert result.summary["steps"] == 20


def test_bf16_on_a_cpu_is_warned_of(tmp_path):
    _, events = train(small_run("train.precision=bf16", "train.epochs=1"), tmp_path)
    assert any(isinstance(e, Notice) and e.warning and "use train.precision=fp32" in e.text for e in events)
