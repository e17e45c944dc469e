"""The identity holds what may change bits, and nothing else."""

import json

import pytest

from lockstep.spec import Checkpoint, Data, Evaluate, Kernels, Model, Optimizer, Run, Schedule, Train
from lockstep.spec.identity import Identity, changed_data, differences, digest, make_identity


def identity(run: Run | None = None, kernels: str = "stock", **manifest) -> Identity:
    data = {"shape": (1, 8, 8), "files": {"a": 3}, **manifest}
    return make_identity(
        run or Run(), data=data, model={"class": "Net"}, fingerprint={"probe": "ab"}, kernels={"set": kernels}
    )


def test_it_is_flat_and_sorted() -> None:
    table = identity()
    assert list(table) == sorted(table)
    assert table["train.batch"] == 256
    assert table["optimizer.momentum"] == 0.9
    assert table["manifest.files.a"] == 3
    assert table["source.class"] == "Net"
    assert table["numerics.probe"] == "ab"


def test_it_survives_json_without_a_difference() -> None:
    table = identity(Run(data=Data(augment=("flip",))))
    assert differences(json.loads(json.dumps(table)), table) == []
    assert digest(json.loads(json.dumps(table))) == digest(table)


@pytest.mark.parametrize(
    "run",
    [
        Run(data=Data(dir="/elsewhere")),
        Run(model=Model(weights="/elsewhere")),
        Run(kernels=Kernels(table="/elsewhere")),
        Run(checkpoint=Checkpoint(every_steps=7)),
        Run(checkpoint=Checkpoint(keep=7)),
        Run(evaluate=Evaluate(metrics=("top5",))),
    ],
)
def test_where_things_lie_and_when_they_are_saved_is_no_part_of_it(run: Run) -> None:
    assert identity(run) == identity()


@pytest.mark.parametrize(
    ("run", "key"),
    [
        (Run(seed=1), "seed"),
        (Run(model=Model("vgg11")), "model.name"),
        (Run(model=Model(options={"width": 2})), "model.width"),
        (Run(data=Data("cifar10")), "data.name"),
        (Run(data=Data(augment=("flip",))), "data.augment"),
        (Run(data=Data(options={"size": 2})), "data.size"),
        (Run(train=Train(epochs=6)), "train.epochs"),
        (Run(train=Train(batch=512)), "train.batch"),
        (Run(train=Train(lanes=4)), "train.lanes"),
        (Run(train=Train(bands=2)), "train.bands"),
        (Run(optimizer=Optimizer(decay_norms=False)), "optimizer.decay_norms"),
        (Run(optimizer=Optimizer(rates=("head:2",))), "optimizer.rates"),
        (Run(model=Model(freeze=("stem",))), "model.freeze"),
        (Run(train=Train(slices=4)), "train.slices"),
        (Run(train=Train(precision="bf16")), "train.precision"),
        (Run(train=Train(threads=2)), "train.threads"),
        (Run(train=Train(channels_last=True)), "train.channels_last"),
        (Run(train=Train(sync_norm=True)), "train.sync_norm"),
        (Run(optimizer=Optimizer(lr=0.1)), "optimizer.lr"),
        (Run(schedule=Schedule(options={"final": 0.1})), "schedule.final"),
        (Run(train=Train(class_weights="balanced")), "train.class_weights"),
        (Run(data=Data(order="balanced")), "data.order"),
        (Run(evaluate=Evaluate(best="loss")), "evaluate.best"),
    ],
)
def test_what_may_change_bits_is_part_of_it(run: Run, key: str) -> None:
    assert [line.split(":")[0] for line in differences(identity(), identity(run))] == [key]
    assert digest(identity(run)) != digest(identity())


def test_the_kernels_are_those_chosen_not_those_asked_for() -> None:
    assert identity(Run(kernels=Kernels("auto"))) == identity(Run(kernels=Kernels("stock")))
    assert identity(kernels="fused") != identity(kernels="stock")


def test_a_lane_is_compared_where_both_have_one() -> None:
    old, one, other = identity(), {**identity(), "numerics.lane": "a"}, {**identity(), "numerics.lane": "b"}
    assert differences(old, one) == differences(one, old) == []
    assert differences(one, other) == ["numerics.lane: a there, b here"]


def test_grids_of_one_cell_are_as_before_there_were_grids() -> None:
    assert not {"train.bands", "train.slices"} & identity().keys()
    assert identity(Run(train=Train(bands=1, slices=1))) == identity()
    one, four = identity(), identity(Run(train=Train(bands=4)))
    assert differences(one, four) == ["train.bands: 1 there, 4 here"]
    assert differences(four, one) == ["train.bands: 4 there, 1 here"]


def test_differences_say_both_sides() -> None:
    lines = differences(identity(Run(train=Train(batch=512)), extra=1), identity())
    assert lines == ["manifest.extra: 1 there, absent here", "train.batch: 512 there, 256 here"]


def test_data_of_a_run_from_before_the_lane_hash_can_be_changed():
    theirs = {"manifest.train_sha256": "a", "seed": 0}
    ours = {"manifest.train_sha256": "b", "seed": 0, "numerics.lane": "c"}
    assert changed_data(theirs, ours) == ["manifest.train_sha256"]
    assert not changed_data({**theirs, "numerics.lane": "d"}, ours)
