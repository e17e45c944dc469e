"""Weights of torchvision and timm, whose names are written by hand here: neither library is needed."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import ModelError
from lockstep.models import build, load_weights

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
VGG11 = {0: (64, 3), 3: (128, 64), 6: (256, 128), 8: (256, 256), 11: (512, 256), 13: (512, 512)}
VGG11 |= {16: (512, 512), 18: (512, 512)}


def conv_norm(made: dict[str, Tensor], conv: str, norm: str, shape: tuple[int, int, int]) -> None:
    out, channels, side = shape
    made[f"{conv}.weight"] = torch.randn(out, channels, side, side) * (2 / (channels * side**2)) ** 0.5
    made |= {f"{norm}.weight": torch.rand(out) + 0.5, f"{norm}.bias": torch.randn(out) * 0.1}
    made |= {f"{norm}.running_mean": torch.randn(out) * 0.1, f"{norm}.running_var": torch.rand(out) + 0.5}
    made[f"{norm}.num_batches_tracked"] = torch.tensor(7)


def torchvision_resnet(name: str, classes: int = 5) -> dict[str, Tensor]:
    """Random tensors by torchvision's names."""
    torch.manual_seed(1)
    made: dict[str, Tensor] = {}
    conv_norm(made, "conv1", "bn1", (64, 3, 7))
    expansion, channels = (1 if name == "resnet18" else 4), 64
    for layer, depth in enumerate(DEPTHS[name], start=1):
        width = 32 << layer
        sides = (3, 3) if expansion == 1 else (1, 3, 1)
        for index in range(depth):
            block = f"layer{layer}.{index}"
            if index == 0 and (layer > 1 or expansion == 4):
                side = f"{block}.downsample"
                conv_norm(made, f"{side}.0", f"{side}.1", (width * expansion, channels, 1))
            for number, kernel in enumerate(sides, start=1):
                out = width * expansion if number == len(sides) else width
                conv_norm(made, f"{block}.conv{number}", f"{block}.bn{number}", (out, channels, kernel))
                channels = out
    return made | {"fc.weight": torch.randn(classes, channels) * 0.05, "fc.bias": torch.randn(classes)}


def forward_resnet18(given: dict[str, Tensor], x: Tensor) -> Tensor:
    """Its forward pass in eval mode, by functions of torch alone."""

    def norm(x: Tensor, name: str) -> Tensor:
        parts = (given[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts)

    x = F.relu(norm(F.conv2d(x, given["conv1.weight"], stride=2, padding=3), "bn1"))
    x = F.max_pool2d(x, 3, 2, 1)
    for layer in range(1, 5):
        for index in range(2):
            block, stride = f"layer{layer}.{index}", 2 if layer > 1 and index == 0 else 1
            y = F.conv2d(x, given[f"{block}.conv1.weight"], stride=stride, padding=1)
            y = F.conv2d(F.relu(norm(y, f"{block}.bn1")), given[f"{block}.conv2.weight"], padding=1)
            if stride == 2:
                x = F.conv2d(x, given[f"{block}.downsample.0.weight"], stride=2)
                x = norm(x, f"{block}.downsample.1")
            x = F.relu(norm(y, f"{block}.bn2") + x)
    return F.linear(x.mean((2, 3)), given["fc.weight"], given["fc.bias"])


def resnet(name: str, classes: int = 5) -> torch.nn.Module:
    return build(name, in_channels=3, num_classes=classes, image_size=(96, 96))


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, path)
    return path


def test_a_resnet18_computes_what_torchvisions_does(tmp_path: Path) -> None:
    given = torchvision_resnet("resnet18")
    model = resnet("resnet18").eval()
    assert load_weights(model, save(tmp_path / "w.safetensors", given)) == []
    assert int(model.state_dict()["blocks.layer4_1.main.4.num_batches_tracked"]) == 7
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        found = model.double()(images.double())
    expected = forward_resnet18({name: value.double() for name, value in given.items()}, images.double())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_resnet50_takes_every_tensor_and_a_head_of_another_size_starts_anew(tmp_path: Path) -> None:
    given = torchvision_resnet("resnet50", classes=7)
    older = {name: value for name, value in given.items() if not name.endswith("num_batches_tracked")}
    model = resnet("resnet50")
    renewed = load_weights(model, save(tmp_path / "w.safetensors", older))
    assert renewed == ["blocks.classifier.1.weight", "blocks.classifier.1.bias"]
    state = model.state_dict()
    assert torch.equal(state["blocks.layer3_5.main.6.weight"], given["layer3.5.conv3.weight"])
    assert torch.equal(state["blocks.layer2_0.shortcut.1.bias"], given["layer2.0.downsample.1.bias"])
    assert torch.equal(state["blocks.stem.1.running_var"], given["bn1.running_var"])


def test_vgg11(tmp_path: Path) -> None:
    given = {f"features.{n}.weight": torch.randn(*shape, 3, 3) for n, shape in VGG11.items()}
    given |= {f"features.{n}.bias": torch.randn(shape[0]) for n, shape in VGG11.items()}
    for number, shape in {0: (4096, 512), 3: (4096, 4096), 6: (4, 4096)}.items():
        given[f"classifier.{number}.weight"] = torch.zeros(shape) + number
        given[f"classifier.{number}.bias"] = torch.randn(shape[0])
    model = build("vgg11", in_channels=3, num_classes=4, image_size=(32, 32))
    assert load_weights(model, save(tmp_path / "w.safetensors", given)) == []
    state = model.state_dict()
    assert torch.equal(state["blocks.block5.2.weight"], given["features.18.weight"])
    assert torch.equal(state["blocks.hidden2.1.bias"], given["classifier.3.bias"])
    assert torch.equal(state["blocks.classifier.weight"], given["classifier.6.weight"])


def test_what_is_missing_or_left_over_is_named(tmp_path: Path) -> None:
    given = torchvision_resnet("resnet18")
    bias = given.pop("layer1.0.bn1.bias")
    with pytest.raises(ModelError, match=r"lacks blocks.layer1_0.main.1.bias: set model.name"):
        load_weights(resnet("resnet18"), save(tmp_path / "a", given))
    given |= {"layer1.0.bn1.bias": bias, "layer1.0.se.bias": bias.clone()}
    with pytest.raises(ModelError, match=r"has layer1.0.se.bias, which the model has not"):
        load_weights(resnet("resnet18"), save(tmp_path / "b", given))


@pytest.mark.parametrize(
    ("name", "key", "why"),
    [
        ("alexnet", "features.0.weight", "torchvision's alexnet has other widths"),
        ("googlenet", "inception3a.branch1.conv.weight", "torchvision's googlenet has batch norms"),
    ],
)
def test_another_network_of_the_same_name_is_refused(tmp_path: Path, name: str, key: str, why: str) -> None:
    model = build(name, in_channels=3, num_classes=4, image_size=(64, 64))
    with pytest.raises(ModelError, match=why):
        load_weights(model, save(tmp_path / "w", {key: torch.zeros(2)}))
