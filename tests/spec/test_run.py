"""A Run is checked when it is made: every error names the key, the value and the fix."""

import dataclasses
from importlib.metadata import version

import pytest

from lockstep.errors import SpecError
from lockstep.spec import Checkpoint, Data, Kernels, Model, Optimizer, Run, Schedule, Train
from lockstep.spec.rule.update_rule import OPTIMIZERS, SCHEDULES
from lockstep.spec.system import extra_command


def test_weights_none_start_from_nothing():
    assert Model(weights="none") == Model()


def test_an_extra_is_installed_beside_the_torch_that_is_here():
    torch = version("torch").partition("+")[0]
    assert extra_command("timm") == f"pip install 'lockstep-train[timm]' torch=={torch}"


def test_every_key_has_a_default() -> None:
    run = Run()
    assert (run.seed, run.model.name, run.data.name) == (0, "lenet5", "shapes")
    assert (run.train.batch, run.train.lanes, run.optimizer.name) == (256, 8, "momentum")


def test_a_run_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Run().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Run(seed="1"), "seed='1' must be a whole number, not str"),
        (lambda: Run(seed=True), "seed=True must be a whole number, not bool"),
        (lambda: Run(model="lenet5"), "model='lenet5' must be a Model, not str"),
        (lambda: Train(epochs=1.0), "train.epochs=1.0 must be a whole number, not float"),
        (lambda: Train(channels_last=1), "train.channels_last=1 must be true or false, not int"),
        (lambda: Train(clip="x"), "train.clip='x' must be a finite number, not str"),
        (lambda: Train(clip=True), "train.clip=True must be a finite number, not bool"),
        (lambda: Optimizer(lr=float("nan")), "optimizer.lr=nan must be a finite number"),
        (lambda: Optimizer(lr=float("inf")), "optimizer.lr=inf must be a finite number"),
        (lambda: Model(name=None), "model.name=None must be text"),
        (lambda: Data(dir=3), "data.dir=3 must be text, not int"),
        (lambda: Data(augment=3), "data.augment=3 must be a list of names"),
        (lambda: Data(augment=["flip", 1]), "data.augment=['flip', 1] must be a list of names"),
        (lambda: Model(options=3), "model.options=3 must be a table"),
    ],
)
def test_a_wrong_type_names_the_key_and_what_it_must_be(make, message: str) -> None:
    with pytest.raises(SpecError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Run(seed=-1), "seed=-1 must be from 0 to 2^63-1"),
        (lambda: Run(seed=2**63), "must be from 0 to 2^63-1"),
        (lambda: Train(epochs=0), "train.epochs=0 must be at least 1"),
        (lambda: Train(batch=0), "train.batch=0 must be at least 1"),
        (lambda: Train(lanes=0), "train.lanes=0 must be at least 1"),
        (lambda: Train(threads=-2), "train.threads=-2 must be at least 1"),
        (lambda: Train(bands=0), "train.bands=0 must be at least 1"),
        (lambda: Train(bands=6), "train.bands=6 must be a power of two: use 4 or 8"),
        (lambda: Train(bands=65), "train.bands=65 must be at most 64"),
        (
            lambda: Run(train=Train(bands=2), kernels=Kernels("compiled")),
            "train.bands=2, train.slices=1: compiled kernels have no such grid: use kernels.set=stock",
        ),
        (lambda: Train(slices=3), "train.slices=3 must be a power of two: use 2 or 4"),
        (lambda: Train(slices=128), "train.slices=128 must be at most 64"),
        (lambda: Train(label_smoothing=1.0), "train.label_smoothing=1.0 must be at least 0 and below 1"),
        (lambda: Train(ema=-0.1), "train.ema=-0.1 must be at least 0 and below 1"),
        (lambda: Train(clip=-1), "train.clip=-1.0 must be 0 (off) or the largest gradient norm"),
        (lambda: Optimizer(lr=0), "optimizer.lr=0.0 must be above 0"),
        (lambda: Optimizer(weight_decay=-1), "optimizer.weight_decay=-1.0 must be 0 or more"),
        (lambda: Optimizer(options={"momentum": 1}), "optimizer.momentum=1.0 must be at least 0 and below 1"),
        (lambda: Optimizer("adam", options={"eps": 0}), "optimizer.eps=0.0 must be above 0"),
        (lambda: Optimizer("lars", options={"trust": 0}), "optimizer.trust=0.0 must be above 0"),
        (lambda: Optimizer("muon", options={"rest_lr": 0}), "optimizer.rest_lr=0.0 must be above 0"),
        (lambda: Optimizer("muon", options={"rest": 1}), "optimizer.rest: unknown value '1'"),
        (lambda: Schedule(warmup_epochs=-1), "schedule.warmup_epochs=-1.0 must be 0 or more"),
        (lambda: Schedule("step", options={"every_epochs": 0}), "schedule.every_epochs=0.0 must be above 0"),
        (lambda: Schedule(options={"final": -1}), "schedule.final=-1.0 must be 0 or more"),
        (lambda: Schedule("onecycle", options={"peak": 0}), "schedule.peak=0.0 must be above 0"),
        (lambda: Schedule("onecycle", warmup_epochs=1), "schedule.warmup_epochs=1.0 must be 0 with onecycle"),
        (lambda: Schedule("onecycle", options={"peak": 1}), "schedule.peak=1.0 must be below 1"),
        (lambda: Checkpoint(every_steps=0), "checkpoint.every_steps=0 must be at least 1"),
        (lambda: Checkpoint(keep=-1), "checkpoint.keep=-1 must be 0 (three while the run trains"),
        (
            lambda: Run(train=Train(epochs=2), schedule=Schedule(warmup_epochs=2.5)),
            "schedule.warmup_epochs=2.5 must not pass train.epochs=2",
        ),
    ],
)
def test_a_value_out_of_range_names_the_rule(make, message: str) -> None:
    with pytest.raises(SpecError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Train(precision="bf61"), "train.precision: unknown value 'bf61': did you mean 'bf16'?"),
        (lambda: Train(loss="cross-entropy"), "did you mean 'cross_entropy'?"),
        (lambda: Kernels(set="stok"), "kernels.set: unknown value 'stok': did you mean 'stock'?"),
        (
            lambda: Optimizer(name="adamww"),
            "optimizer.name: unknown optimizer 'adamww': did you mean 'adamw'?",
        ),
        (lambda: Schedule(name="cosin"), "schedule.name: unknown schedule 'cosin': did you mean 'cosine'?"),
        (lambda: Data(augment=["flop"]), "data.augment: unknown augmentation 'flop': did you mean 'flip'?"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(make, message: str) -> None:
    with pytest.raises(SpecError) as error:
        make()
    assert message in str(error.value)
    assert "choose from" in str(error.value)


@pytest.mark.parametrize(("lanes", "fix"), [(3, "use 2 or 4"), (12, "use 8 or 16"), (255, "use 128 or 256")])
def test_lanes_must_be_a_power_of_two(lanes: int, fix: str) -> None:
    with pytest.raises(SpecError, match=f"train.lanes={lanes} must be a power of two: {fix}"):
        Train(batch=lanes, lanes=lanes)


@pytest.mark.parametrize(
    ("batch", "lanes", "fix"), [(100, 8, "use batch 104 or 96, or"), (3, 8, "use batch 8, or")]
)
def test_batch_must_be_divisible_by_lanes(batch: int, lanes: int, fix: str) -> None:
    with pytest.raises(SpecError) as error:
        Train(batch=batch, lanes=lanes)
    assert f"train.batch={batch} is not divisible by train.lanes={lanes}" in str(error.value)
    assert fix in str(error.value)


def test_label_smoothing_is_for_cross_entropy_only() -> None:
    assert Train(label_smoothing=0.1).label_smoothing == 0.1
    with pytest.raises(SpecError, match=r"label_smoothing=0\.1 works with loss=cross_entropy only"):
        Train(loss="squared_error", label_smoothing=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_fills_its_own_keys_and_keeps_what_is_given(name: str) -> None:
    defaults = OPTIMIZERS[name]
    assert Optimizer(name).options == defaults
    for key in defaults:
        other = "momentum" if key == "rest" else 0.5
        assert Optimizer(name, options={key: other}).options == {**defaults, key: other}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_fills_its_own_keys_and_keeps_what_is_given(name: str) -> None:
    defaults = SCHEDULES[name]
    assert Schedule(name).options == defaults
    for key in defaults:
        assert Schedule(name, options={key: 0.5}).options == {**defaults, key: 0.5}


def test_a_key_of_another_optimizer_is_refused() -> None:
    with pytest.raises(SpecError) as error:
        Optimizer("sgd", options={"momentum": 0.9})
    assert "optimizer: unknown key 'momentum'" in str(error.value)
    assert "(for sgd)" in str(error.value)


def test_a_misspelled_key_of_a_schedule_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="unknown key 'finale': did you mean 'final'"):
        Schedule("cosine", options={"finale": 0.1})


@pytest.mark.parametrize("value", ["0.9", None, True, float("inf"), float("nan"), 10**400])
def test_own_keys_take_finite_numbers_only(value) -> None:
    with pytest.raises(SpecError, match=r"optimizer\.eps"):
        Optimizer("adam", options={"eps": value})


def test_a_whole_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(SpecError, match=r"optimizer\.lr"):
        Optimizer(lr=10**400)


def test_whole_numbers_become_floats_where_floats_are_meant() -> None:
    assert isinstance(Optimizer(lr=1).lr, float)
    assert isinstance(Optimizer("adam", options={"eps": 1}).options["eps"], float)


@pytest.mark.parametrize("text", ["flip,crop:4", " flip , crop:4 ,", ["flip", "crop:4"], ("flip", "crop:4")])
def test_augmentations_may_be_one_text_with_commas(text) -> None:
    assert Data(augment=text).augment == ("flip", "crop:4")


@pytest.mark.parametrize("item", ["flip:2", "crop:0", "crop:-1", "cutout:x", "crop:1.5"])
def test_the_pixels_of_an_augmentation_are_checked(item: str) -> None:
    with pytest.raises(
        SpecError, match=r"must be (like crop:4 or cutout:8, in pixels|flip alone, without numbers)"
    ):
        Data(augment=(item,))


def test_options_are_copied_so_that_the_callers_table_stays_apart() -> None:
    given = {"width": 3}
    model = Model(options=given)
    given["width"] = 4
    assert model.options["width"] == 3


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_rates_grow_with_the_batch(scale: str, factor: float) -> None:
    run = Run(train=Train(batch=1024), optimizer=Optimizer(scale=scale, base_batch=256))
    assert run.rate_factor == factor


def test_a_scale_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match=r"optimizer.scale: unknown value 'cubic'"):
        Optimizer(scale="cubic")
    with pytest.raises(SpecError, match=r"optimizer.base_batch=0 must be at least 1"):
        Optimizer(base_batch=0)
