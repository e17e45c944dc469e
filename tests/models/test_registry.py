"""Models by name: what is refused, and in which words; timm by a stand-in."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.models import build, model_names
from lockstep.models.registry import model_options
from lockstep.spec.system import extra_command


def make(name: str, size: tuple[int, int] = (64, 64), **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build(name, in_channels=3, num_classes=10, image_size=size, options=options)


def message(name: str, size: tuple[int, int] = (64, 64), **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        make(name, size, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_names_and_options() -> None:
    assert model_names() == (
        *("emotion48", "lenet5", "alexnet", "googlenet", "vgg11"),
        *("resnet18", "resnet34", "resnet50"),
    )
    assert model_options("lenet5") == ("activation", "pooling")
    assert model_options("googlenet") == ("aux",)
    assert model_options("resnet50") == ("stem", "zero_init_residual")
    assert model_options("timm:anything") == ()
    with pytest.raises(ModelError):
        model_options("lenet")


def test_unknown_model_names_the_nearest() -> None:
    assert message("resnet19").startswith("unknown model 'resnet19': did you mean 'resnet")
    assert "choose from alexnet, emotion48" in message("zzz")


def test_unknown_option_names_the_nearest_key() -> None:
    text = message("emotion48", drop_out=0.1)
    assert text == "model.drop_out: unknown key: did you mean 'model.dropout'? emotion48 takes dropout"
    assert "did you mean" not in message("emotion48", zzz=1)


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        (
            "emotion48",
            {"dropout": "0.1"},
            "model.dropout='0.1': emotion48 takes a number of at least 0 and below 1",
        ),
        ("emotion48", {"dropout": 1.0}, "model.dropout=1.0"),
        ("emotion48", {"dropout": -0.1}, "model.dropout=-0.1"),
        ("emotion48", {"dropout": float("nan")}, "model.dropout=nan"),
        ("vgg11", {"dropout": True}, "model.dropout=True"),
        (
            "lenet5",
            {"activation": "gelu"},
            "model.activation='gelu': lenet5 takes one of 'relu', 'sigmoid', 'tanh'",
        ),
        ("lenet5", {"pooling": ["max"]}, "model.pooling=['max']"),
        ("googlenet", {"aux": 1}, "model.aux=1: googlenet takes true or false"),
        ("resnet18", {"stem": "tiny"}, "'auto', 'imagenet', 'cifar'"),
    ],
)
def test_wrong_option_value_names_the_rule(name: str, options: dict[str, Any], rule: str) -> None:
    assert rule in message(name, **options)


def test_an_image_too_small_names_size_rule_and_fix() -> None:
    assert message("alexnet", (28, 28)) == (
        "alexnet needs images of at least 63x63; data gives 28x28: set data.size=64 or choose lenet5"
    )
    assert message("vgg11", (64, 10)).endswith("data gives 64x10: set data.size=32 or choose emotion48")
    assert message("emotion48", (4, 4)).endswith("data gives 4x4: set data.size=8")


@pytest.mark.parametrize(("channels", "classes"), [(0, 10), (3, 0)])
def test_data_without_channels_or_classes(channels: int, classes: int) -> None:
    with pytest.raises(ModelError, match="data gives 0"):
        build("lenet5", in_channels=channels, num_classes=classes, image_size=(28, 28))


def test_timm_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    text = message("timm:resnet18")
    assert text == f"model.name=timm:resnet18 needs timm, not installed: {extra_command('timm')}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A timm that knows one model, refuses one option and notes what it was asked for."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        if "bad" in options:
            raise TypeError("unexpected keyword\n argument 'bad'")
        asked.append((name, options))
        return nn.Identity()

    known = ["tiny_net"]
    stand_in = SimpleNamespace(
        create_model=create_model, is_model=known.__contains__, list_models=lambda: known
    )
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    return asked


def test_timm_is_called_without_pretrained_weights(calls: list[tuple[str, dict[str, Any]]]) -> None:
    make("timm:tiny_net", drop_rate=0.1)
    assert calls == [("tiny_net", {"pretrained": False, "in_chans": 3, "num_classes": 10, "drop_rate": 0.1})]


@pytest.mark.usefixtures("calls")
def test_timm_refusals() -> None:
    assert message("timm:tiny_nit").endswith("timm has no model 'tiny_nit': did you mean 'timm:tiny_net'?")
    assert message("timm:zzz").endswith("timm.list_models() lists them all")
    assert "timm refuses options {'bad': 1}: unexpected keyword argument 'bad'" in message(
        "timm:tiny_net", bad=1
    )
    assert message("timm:tiny_net", pretrained=True).startswith(
        "model.pretrained: the data and model.weights"
    )
