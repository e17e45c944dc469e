"""`lockstep layers`, and what a run under a plan says about its layers."""

import pytest
from forked import call
from PIL import Image
from plan_runs import run
from small import command, summary

RESNET = ("model.name=resnet18", "data.size=32", "train.batch=4", "train.lanes=2", "train.bands=2")


def layers(*arguments, overrides=()):
    return call(command("layers", *arguments, *(word for key in overrides for word in ("-o", key))))


def test_every_layer_has_its_rule_and_share():
    done = layers("--plan", "channel=2,spatial=2", overrides=RESNET)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    first, narrow = lines["blocks.layer1_0.main.0"], lines["blocks.layer4_1.main.3"]
    assert all(text in first for text in ("rows, halo of 2", "16 of 32", "32 of 64", "6.8 %", "100 %"))
    assert "too few rows" in narrow and "256 of 512" in narrow and narrow.endswith(" 0 %")
    assert "5 of 10" in lines["blocks.classifier.1"]
    assert "76 % of the multiplications are cut over spatial=2,channel=2; 6 of 21 layers" in done.stdout
    assert "5 × output channels, too few rows; 1 × outputs, no rows" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "overrides", "said"),
    [
        (("--plan", "spatial=2"), (), "set train.bands=2"),
        (("--plan", "pipeline=2"), (), "cuts no layer"),
        (("--plan", "chanel=2"), (), "did you mean 'channel'"),
        (("--plan", "channel=4"), ("train.slices=2",), "set train.slices=4"),
        (("--plan", "channel=2"), ("kernels.set=fused",), "use kernels.set=stock here, or start the run"),
        (("shape", "--plan", "channel=2"), (), "did you mean 'shapes'"),
    ],
)
def test_bad_words_are_answered_in_one_line(arguments, overrides, said):
    done = layers(*arguments, overrides=overrides)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.gloo
def test_a_run_tells_what_its_layers_sent_and_draws_it(tmp_path):
    overrides = ("data.size=32", "data.num_train=96", "data.num_test=9", "train.epochs=1", "train.bands=2")
    done = run(tmp_path, "--plan", "spatial=2", overrides=overrides, draws=True)
    assert "84 % of the multiplications are cut over spatial=2; 3 of 5 layers" in done.stdout
    assert "3 × whole: no rows" in done.stdout and "exchanges took" in done.stdout
    found = summary(tmp_path / "run")["layers"]
    assert (found["share"], found["bands"], found["slices"], found["timed"]) == (0.8438, 2, 1, "work")
    rows = {row["layer"]: row for row in found["rows"]}
    first, second = rows["blocks.block1.0"], rows["blocks.block2.0"]
    lanes, images = 4, 8
    halo = images * 1 * 2 * 32 * 4  # N × C × rows × width × 4 bytes: 5×5 windows need two rows of the other
    assert first["spatial_mb"] == pytest.approx(lanes * halo / 1e6, abs=1e-6)
    halo = images * 6 * 2 * 14 * 4
    back = images * 16 * 2 * 10 * 4  # the output's gradient has a halo, too
    assert second["spatial_mb"] == pytest.approx(lanes * (halo + back) / 1e6, abs=1e-6)
    assert first["share"] == second["share"] == 1.0 and rows["blocks.hidden1.1"]["share"] == 0.0
    assert first["work_mmac"] == pytest.approx(2 * images * 6 * 28 * 28 * 25 / 1e6)
    assert all(row["busy_s"] > 0 for name, row in rows.items() if name != "gradients")
    weights = 6 * (25 + 1) + 16 * (
        150 + 1
    )  # one worker of two sends the half that the other sums, and its own
    assert rows["gradients"]["spatial_mb"] == pytest.approx(lanes * 4 * weights / 1e6, rel=0.01)
    events = [event for worker in found["timeline"] for event in worker]
    kinds = {what for _, what, _, _ in events}
    assert len(found["timeline"]) == 2 and kinds == {"busy", "spatial"}
    assert all(start >= 0 and found["rows"][row]["layer"] for row, _, start, _ in events)
    with Image.open(tmp_path / "run" / "layers.png") as picture:
        assert picture.width == 1200 and len(picture.convert("RGB").getcolors(1 << 20)) > 50
