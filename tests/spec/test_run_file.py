"""Runs as files: what is printed is read back equal, and odd input gives one clear line."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SpecError
from lockstep.spec import Checkpoint, Data, Evaluate, Kernels, Model, Optimizer, Run, Schedule, Train
from lockstep.spec.rule.loss_rule import LOSSES, METRICS
from lockstep.spec.rule.optimizer_rule import RESTS
from lockstep.spec.rule.update_rule import OPTIMIZERS, SCHEDULES
from lockstep.spec.run import KERNEL_SETS, PRECISIONS, WIRES
from lockstep.spec.run_file import dump_toml, from_table, merge, parse_overrides, read_toml, to_table

NASTY = "\"'\\\n\r\t\b\f\x00\x1f\x7f\x85\u2028€😀#=[]{}"
TEXT = st.text() | st.text(alphabet=NASTY)
SHARE = st.floats(0, 1, exclude_max=True)
SIZE = st.floats(1e-300, 1e300)
SCALAR = st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
COMMON = {"name", "weights", "freeze", "dir", "augment", "normalize", "options"}
OPTIONS = st.dictionaries(TEXT.filter(lambda key: key not in COMMON), SCALAR | st.lists(SCALAR, max_size=3))


@st.composite
def own_keys(draw, table, shares=()):
    name = draw(st.sampled_from(sorted(table)))
    keys = draw(st.sets(st.sampled_from(sorted(table[name])))) if table[name] else ()
    return name, {
        key: draw(st.sampled_from(RESTS))
        if key == "rest"
        else draw(st.floats(0.01, 0.99) if key in shares or table is OPTIMIZERS else SIZE)
        for key in keys
    }


WEIGHTS = st.sampled_from(["none", "balanced"]) | st.lists(st.floats(0.1, 1e300), min_size=1)


@st.composite
def runs(draw):
    lanes = 2 ** draw(st.integers(0, 6))
    loss = draw(st.sampled_from(sorted(LOSSES)))
    train = Train(
        epochs=draw(st.integers(1, 10**6)),
        batch=lanes * draw(st.integers(1, 2**18)),
        lanes=lanes,
        precision=draw(st.sampled_from(PRECISIONS)),
        wire=draw(st.sampled_from(WIRES)),
        loss=loss,
        label_smoothing=draw(SHARE) if loss == "cross_entropy" else 0.0,
        class_weights=draw(WEIGHTS) if loss == "cross_entropy" else "none",
        clip=draw(st.floats(0, 1e300)),
        ema=draw(SHARE),
        sync_norm=draw(st.booleans()),
        channels_last=draw(st.booleans()),
        threads=draw(st.integers(1, 64)),
    )
    augment = draw(st.lists(st.sampled_from(["flip", "crop", "crop:3", "cutout:12"]), max_size=4))
    metrics = draw(st.lists(st.sampled_from([m for m, (k, _) in METRICS.items() if LOSSES[loss] in k])))
    rule, rule_options = draw(own_keys(OPTIMIZERS))
    curve, curve_options = draw(own_keys(SCHEDULES, ("peak",)))
    return Run(
        seed=draw(st.integers(0, 2**63 - 1)),
        model=Model(draw(TEXT), draw(st.none() | TEXT), draw(OPTIONS), ("head", draw(TEXT))),
        data=Data(draw(TEXT), draw(st.none() | TEXT), tuple(augment), draw(OPTIONS)),
        train=train,
        optimizer=Optimizer(rule, draw(SIZE), draw(st.floats(0, 1e300)), rule_options, rates=("a:b:0.5",)),
        schedule=Schedule(curve, 0 if curve == "onecycle" else train.epochs * draw(SHARE), curve_options),
        kernels=Kernels(draw(st.sampled_from(KERNEL_SETS)), draw(st.none() | TEXT)),
        checkpoint=Checkpoint(draw(st.integers(1, 10**9)), draw(st.integers(1, 99))),
        evaluate=Evaluate(
            tuple(metrics), draw(st.sampled_from(["auto", "loss", "min:own"])), draw(st.integers(0, 99))
        ),
    )


@given(runs())
def test_a_printed_run_is_read_back_equal(run: Run) -> None:
    assert from_table(tomllib.loads(dump_toml(run))) == run


@given(runs())
def test_tables_are_read_back_equal(run: Run) -> None:
    assert from_table(to_table(run)) == run


def test_a_file_is_read_back_equal(tmp_path) -> None:
    run = Run(data=Data(dir=NASTY), model=Model(options={NASTY: NASTY}))
    path = tmp_path / "run.toml"
    path.write_bytes(dump_toml(run).encode())
    assert from_table(read_toml(path)) == run


def test_the_example_of_the_design_is_readable() -> None:
    text = """
seed = 0
[model]
name = "lenet5"
[data]
name = "shapes"
augment = ["flip", "crop"]
[train]
epochs = 5
batch = 256
lanes = 8
precision = "fp32"
[optimizer]
name = "momentum"
lr = 0.05
[schedule]
name = "cosine"
warmup_epochs = 1
[kernels]
set = "auto"
"""
    expected = Run(data=Data(augment=("flip", "crop")), schedule=Schedule(warmup_epochs=1))
    assert from_table(tomllib.loads(text)) == expected


def test_a_value_that_toml_cannot_hold_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot be written to TOML"):
        dump_toml(Run(model=Model(options={"width": {"a": object()}})))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trian": {}}, "unknown key 'trian': did you mean 'train'?"),
        ({"train": {"epoch": 3}}, "train: unknown key 'epoch': did you mean 'epochs'?"),
        ({"kernels": {"sett": "auto"}}, "kernels: unknown key 'sett': did you mean 'set'?"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer: unknown key 'learning_rate'"),
        ({"optimizer": {"options": {}}}, "optimizer: unknown key 'options'"),
        ({"optimizer": 3}, "optimizer=3 must be a table: write [optimizer] or optimizer.KEY=VALUE"),
        ({"seed": {}}, "seed={} must be a whole number"),
    ],
)
def test_a_wrong_table_names_the_key(table, message: str) -> None:
    with pytest.raises(SpecError) as error:
        from_table(table)
    assert message in str(error.value)


def test_a_missing_file_is_one_line(tmp_path) -> None:
    with pytest.raises(SpecError, match=r"nope\.toml: cannot read the file: No such file"):
        read_toml(tmp_path / "nope.toml")


@pytest.mark.parametrize("data", [b"a = ", b"[x", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_broken_file_is_one_line(tmp_path, data: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(SpecError, match=r"bad\.toml: not a TOML file"):
        read_toml(path)


def test_a_layer_changes_only_what_it_gives() -> None:
    base = to_table(Run())
    merged = merge(base, {"train": {"epochs": 9}, "seed": 4})
    assert from_table(merged) == Run(seed=4, train=Train(epochs=9))
    assert base == to_table(Run())


def test_another_name_forgets_the_options_of_the_old_one() -> None:
    base = to_table(Run(optimizer=Optimizer("adam", lr=0.5, options={"beta1": 0.5})))
    run = from_table(merge(base, {"optimizer": {"name": "momentum"}}))
    assert run.optimizer == Optimizer("momentum", lr=0.5)


def test_another_name_keeps_the_options_given_with_it() -> None:
    base = to_table(Run(model=Model("a", options={"width": 3, "depth": 2})))
    run = from_table(merge(base, {"model": {"name": "b", "width": 7}}))
    assert run.model == Model("b", options={"width": 7})


def test_the_same_name_keeps_the_options() -> None:
    base = to_table(Run(model=Model("a", options={"width": 3})))
    assert from_table(merge(base, {"model": {"name": "a"}})).model.options == {"width": 3}


@pytest.mark.parametrize(
    ("item", "table"),
    [
        ("seed=3", {"seed": 3}),
        (" optimizer.lr = 0.1 ", {"optimizer": {"lr": 0.1}}),
        ("data.name=cifar10", {"data": {"name": "cifar10"}}),
        ('data.name="cifar10"', {"data": {"name": "cifar10"}}),
        ("data.augment=flip,crop", {"data": {"augment": "flip,crop"}}),
        ('data.augment=["flip"]', {"data": {"augment": ["flip"]}}),
        ("train.channels_last=true", {"train": {"channels_last": True}}),
        ("data.dir=/a=b", {"data": {"dir": "/a=b"}}),
        ("data.dir=", {"data": {"dir": ""}}),
        ("optimizer=3", {"optimizer": 3}),
    ],
)
def test_overrides_are_toml_values_or_plain_text(item: str, table) -> None:
    assert parse_overrides([item]) == table


@pytest.mark.parametrize("item", ["", "x", "=", "=3", ".=1", "a.=1", ".a=1", "a..b=1", "a.b.c=1", " =1"])
def test_an_override_of_another_form_is_refused(item: str) -> None:
    with pytest.raises(SpecError, match=r"must be KEY=VALUE or SECTION\.KEY=VALUE"):
        parse_overrides([item])


def test_a_key_cannot_be_a_value_and_a_section() -> None:
    with pytest.raises(SpecError, match="given both as a value and as a section"):
        parse_overrides(["optimizer=3", "optimizer.lr=1"])


def test_the_last_override_of_a_key_counts() -> None:
    assert parse_overrides(["train.epochs=1", "train.batch=8", "train.epochs=2"]) == {
        "train": {"epochs": 2, "batch": 8}
    }


@given(st.text())
def test_no_override_text_gives_another_error(item: str) -> None:
    try:
        from_table(merge(to_table(Run()), parse_overrides([item])))
    except SpecError as error:
        assert str(error)
