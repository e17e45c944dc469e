"""Targets and outputs of any shape through `lockstep.train`: one hash, metrics, and what is refused."""

import json
import sys

import forked
import pytest
import torch
import torch.nn.functional as F
from small import rows, small_run, summary, train
from torch import nn

import lockstep
from lockstep.errors import DataError, ModelError
from lockstep.report.plot import draw_curves
from lockstep.runs.event import Notice


class Points:
    """Images of a bright point; the target is made of its place."""

    def __init__(self, target, length=40):
        self.target, self.length = target, length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if number >= self.length:
            raise IndexError
        image = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(number)) * 0.1
        row, column = number % 8, number // 8 % 8
        image[0, row, column] += 1.0
        return image, self.target(image, row, column)


class TwoHeads(nn.Module):
    """A map as large as the image, and where its point is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.map, self.place = nn.Conv2d(4, 1, 1), nn.Linear(256, 2)

    def forward(self, x):
        hidden = self.body(x)
        return {"map": self.map(hidden), "place": self.place(hidden.flatten(1))}


def mask_and_place(image, row, column):
    return {"mask": (image > 0.5).float(), "place": (float(row) / 8, float(column) / 8)}


def both_losses(outputs, targets):
    place = torch.stack(targets["place"], 1)
    on_mask = F.binary_cross_entropy_with_logits(outputs["map"], targets["mask"])
    return on_mask + F.mse_loss(outputs["place"], place.float())


def iou(outputs, targets):
    found, there = outputs["map"] > 0, targets["mask"] > 0.5
    return (found & there).sum(), (found | there).sum()


def error(outputs, targets):
    return (outputs["place"] - torch.stack(targets["place"], 1)).abs().mean()


RUN = ("train.batch=16", "train.lanes=8", "train.epochs=2", "checkpoint.every_steps=1", "data.augment=[]")
GIVEN = {"loss": both_losses, "metrics": {"iou": iou, "error": error}}
SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import lockstep, torch
from small import small_run
from test_own_targets import *
if __name__ == "__main__":
    torch.manual_seed(3)
    launch = lockstep.Launch(name="run", runs_dir="runs", device="cpu", workers={workers}, quiet=True)
    data = Points(mask_and_place), Points(mask_and_place, 21)
    lockstep.train(small_run(*RUN), TwoHeads(), data, launch=launch, **GIVEN)
"""


def train_points(tmp_path, target=mask_and_place, model=None, *keys, **given):
    torch.manual_seed(3)
    data = Points(target), Points(target, 21)
    model = model or TwoHeads()
    return train(small_run(*RUN, *keys), tmp_path, model=model, data=data, **{**GIVEN, **given})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    result, _ = train_points(folder)
    return result.summary, folder


@pytest.mark.gloo
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_dicts_and_several_heads_have_one_hash(alone, tmp_path, workers):
    paths = [path for path in sys.path if path] + [__file__.rpartition("/")[0]]
    (tmp_path / "script.py").write_text(SCRIPT.format(paths=paths, workers=workers))
    done = forked.call([sys.executable, "script.py"], None, tmp_path, launches=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary(tmp_path / "runs" / "run")
    for key in ("weights_sha256", "optimizer_sha256", "loss", "metrics", "best_step"):
        assert found[key] == alone[0][key], key
    assert found["workers"] == workers


def test_metrics_are_those_of_all_samples(alone, tmp_path):
    found, folder = alone
    model = lockstep.load(folder / "run", TwoHeads()).eval()
    test = Points(mask_and_place, 21)
    images, masks = (torch.stack(part) for part in zip(*((x, y["mask"]) for x, y in test), strict=True))
    places = torch.tensor([y["place"] for _, y in test])
    with torch.no_grad():
        outputs = model(images)
    above, below = iou(outputs, {"mask": masks})
    distance = (outputs["place"] - places).abs().mean()
    assert found["metrics"]["iou"] == pytest.approx(float(above / below), abs=1e-6)
    assert found["metrics"]["error"] == pytest.approx(float(distance), rel=1e-5)
    last = rows(folder / "run", "epoch")[-1]
    assert last["test_iou"] == found["metrics"]["iou"] and "train_accuracy" not in last
    assert "accuracy" not in found and "accuracy" not in rows(folder / "run", "step")[0]
    assert draw_curves(folder / "run").exists()
    again = lockstep.evaluate(folder / "run", TwoHeads(), (test, test), device="cpu", **GIVEN)
    assert (again.loss, again.metrics, again.accuracy) == (found["loss"], found["metrics"], None)
    with pytest.raises(ModelError, match="outputs of any shape: give it"):
        lockstep.evaluate(folder / "run", TwoHeads(), (test, test), metrics={"iou": iou}, device="cpu")


def test_a_predictor_gives_what_the_model_gives(alone):
    predict = lockstep.predictor(alone[1] / "run", model=TwoHeads(), device="cpu")
    images = torch.stack([x for x, _ in Points(mask_and_place, 5)])
    found = predict(images)
    wanted = lockstep.load(alone[1] / "run", TwoHeads())(images)
    assert {key: value.shape for key, value in found.items()} == {"map": (5, 1, 8, 8), "place": (5, 2)}
    assert all(torch.allclose(found[key], wanted[key], atol=1e-5) for key in wanted)
    assert predict(images[:0])["place"].shape == (0, 2)


def test_a_run_goes_on_to_the_same_bits(alone, tmp_path):
    def stop(event):
        if getattr(event, "step", 0) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_points(tmp_path, on_event=stop)
    result, _ = train_points(tmp_path, launch={"resume": str(tmp_path / "run")})
    for key in ("weights_sha256", "metrics", "best_step"):
        assert result.summary[key] == alone[0][key]


CASES = {
    "a number": (lambda image, row, column: row / 8, lambda o, y: F.mse_loss(o[:, 0], y), 1),
    "several labels": (
        lambda image, row, column: torch.tensor([row > 3, column > 3, row > column]).float(),
        F.binary_cross_entropy_with_logits,
        3,
    ),
    "class numbers by another output": (
        lambda image, row, column: row,
        lambda o, y: F.mse_loss(o[:, 0], y.float()),
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_other_targets_train(name, tmp_path):
    target, loss, outputs = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
    result, events = train_points(tmp_path, target, model, loss=loss, metrics={})
    first, *_, last = rows(tmp_path / "run", "epoch")
    assert last["train_loss"] < first["train_loss"] and "accuracy" not in result.summary
    warned = [e.text for e in events if isinstance(e, Notice) and "there is no accuracy" in e.text]
    assert len(warned) == (name == "class numbers by another output")


def test_metrics_stand_beside_the_accuracy_of_a_classifier(tmp_path):
    def hits(outputs, labels):
        return (outputs.argmax(1) == labels).double().mean()

    result, _ = train(small_run("train.epochs=1"), tmp_path, metrics={"hits": hits})
    assert result.summary["metrics"]["hits"] == pytest.approx(result.summary["accuracy"], abs=1e-9)


def test_what_does_not_fit_is_refused_before_any_work(tmp_path):
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    ragged = lambda image, row, column: torch.zeros(row + 1)  # noqa: E731
    cases = [
        (
            (mask_and_place, None),
            {"loss": None, "metrics": {}},
            DataError,
            "targets of any shape need a loss",
        ),
        ((ragged, linear), {"loss": lambda o, y: o.mean(), "metrics": {}}, DataError, "pad them in the data"),
        ((mask_and_place, linear), {"metrics": {}}, ModelError, "a step of this model and loss on 2 images"),
        ((), {"metrics": {"loss": iou}}, ModelError, "'loss' is no name for a metric"),
        ((), {"metrics": [iou]}, ModelError, "metrics: give a dict of names and functions"),
        (
            (),
            {"metrics": {"iou": lambda o, y: o["nothing"]}},
            ModelError,
            "metrics: 'iou' fails on 2 samples",
        ),
        ((), {"metrics": {"wide": lambda o, y: o["place"]}}, ModelError, "'wide' gives 4 values"),
        ((mask_and_place, None, "data.augment=['flip']"), {}, DataError, "lie on them and would stay"),
    ]
    for positional, given, kind, message in cases:
        with pytest.raises(kind, match=message):
            train_points(tmp_path, *positional, **given)
        assert not list(tmp_path.iterdir()), message


def test_a_target_that_is_not_finite_is_named(tmp_path):
    def late(image, row, column):
        return torch.tensor(float("nan") if row == 7 else 1.0)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    with pytest.raises(DataError, match=r"train\[\d+\]: the target has values that are not finite"):
        train_points(tmp_path, late, model, loss=lambda o, y: F.mse_loss(o[:, 0], y), metrics={})


def test_the_summary_is_plain_json(alone):
    assert json.loads((alone[1] / "run" / "summary.json").read_text())["metrics"].keys() == {"iou", "error"}
