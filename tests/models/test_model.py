"""Every model: its published size, its shapes, its blocks and its backward."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.models import blocks, build, model_names
from lockstep.models.block import BlockModel

SMALL = {  # the smallest image of each model, and one that is not square
    "emotion48": [(8, 8), (48, 48), (17, 30)],
    "lenet5": [(12, 12), (28, 28), (33, 40)],
    "alexnet": [(63, 63), (64, 80)],
    "googlenet": [(16, 16), (32, 32), (50, 64)],
    "vgg11": [(32, 32), (40, 70)],
    "resnet18": [(8, 8), (32, 32), (97, 100)],
    "resnet34": [(17, 32)],
    "resnet50": [(8, 8), (96, 96)],
}


def make(name: str, channels: int, classes: int, size: tuple[int, int], **options: Any) -> BlockModel:
    torch.manual_seed(0)
    model = build(name, in_channels=channels, num_classes=classes, image_size=size, options=options)
    assert isinstance(model, BlockModel)
    return model


def on_meta(name: str, channels: int, classes: int, size: tuple[int, int], **options: Any) -> BlockModel:
    """Shapes without memory: what VGG's 133 M parameters need to be tested in no time."""
    with torch.device("meta"):
        return make(name, channels, classes, size, **options)


@pytest.mark.parametrize(
    ("name", "input_shape", "classes", "options", "published"),
    [
        # Three convolutions 320 + 18,496 + 73,856, dense 1,179,904 + 1,799: counted from figures.md.
        ("emotion48", (1, 48, 48), 7, {}, 1_274_375),
        # LeCun et al. 1998 with full connections in C3, as every textbook counts it.
        ("lenet5", (1, 28, 28), 10, {}, 61_706),
        ("lenet5", (1, 32, 32), 10, {}, 61_706),
        # Krizhevsky et al. 2012 ("60 million"); exactly, BVLC's bvlc_alexnet.
        ("alexnet", (3, 227, 227), 1000, {}, 60_965_224),
        ("alexnet", (3, 224, 224), 1000, {}, 60_965_224),
        # Szegedy et al. 2014; exactly, BVLC's bvlc_googlenet for deployment and for training.
        ("googlenet", (3, 224, 224), 1000, {"aux": False}, 6_998_552),
        ("googlenet", (3, 224, 224), 1000, {}, 13_378_280),
        # torchvision's table of models: vgg11, resnet18, resnet34, resnet50.
        ("vgg11", (3, 224, 224), 1000, {}, 132_863_336),
        ("resnet18", (3, 224, 224), 1000, {}, 11_689_512),
        ("resnet34", (3, 224, 224), 1000, {}, 21_797_672),
        ("resnet50", (3, 224, 224), 1000, {}, 25_557_032),
    ],
)
def test_published_number_of_parameters(
    name: str, input_shape: tuple[int, int, int], classes: int, options: Mapping[str, Any], published: int
) -> None:
    channels, height, width = input_shape
    model = on_meta(name, channels, classes, (height, width), **options)
    assert sum(p.numel() for p in model.parameters()) == published
    assert model.eval()(torch.empty(2, *input_shape, device="meta")).shape == (2, classes)


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize(("channels", "classes"), [(1, 2), (3, 10), (5, 7)])
def test_shapes_of_any_size_channels_and_classes(name: str, channels: int, classes: int) -> None:
    for height, width in SMALL[name]:
        model = on_meta(name, channels, classes, (height, width))
        out = model(torch.empty(2, channels, height, width, device="meta"))
        for logits in out if isinstance(out, tuple) else (out,):
            assert logits.shape == (2, classes)


@pytest.mark.parametrize(
    "name", ["emotion48", "lenet5", "alexnet", "googlenet", "vgg11", "resnet18", "resnet50"]
)
def test_blocks_compose_and_backward_reaches_every_parameter(name: str) -> None:
    height, width = SMALL[name][0]
    model = make(name, 2, 3, (height, width))
    x = torch.randn(2, 2, height, width)
    out = model(x)
    sum(logits.square().mean() for logits in (out if isinstance(out, tuple) else (out,))).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
    model.eval()
    with torch.no_grad():
        by_block = x
        for _, block in blocks(model):
            by_block = block(by_block)
        assert torch.equal(model(x), by_block)
    assert [block_name for block_name, _ in blocks(model)][-1] == "classifier"


@pytest.mark.parametrize("name", model_names())
def test_nothing_that_a_gpu_computes_in_a_varying_order(name: str) -> None:
    banned = (nn.AdaptiveAvgPool2d, nn.LocalResponseNorm, nn.AvgPool3d)
    model = on_meta(name, 3, 10, SMALL[name][0])
    assert not [module for module in model.modules() if isinstance(module, banned)]


def test_the_seed_decides_the_initialization() -> None:
    first, again = (make("googlenet", 1, 3, (32, 32)).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_first_loss_is_near_that_of_guessing() -> None:
    model = make("googlenet", 3, 10, (32, 32))
    logits, *_ = model(torch.randn(8, 3, 32, 32))
    loss = nn.functional.cross_entropy(logits, torch.arange(8))
    assert 1.0 < loss.item() < 6.0  # ln 10 is 2.3


def test_googlenet_returns_its_heads_in_training_only() -> None:
    model = make("googlenet", 1, 4, (32, 32))
    assert list(model.aux) == ["inception4a", "inception4d"]
    assert model.aux_weight == 0.3
    x = torch.randn(2, 1, 32, 32)
    out = model(x)
    assert isinstance(out, tuple) and [tuple(logits.shape) for logits in out] == [(2, 4)] * 3
    assert model.eval()(x).shape == (2, 4)


def test_googlenet_without_heads_returns_logits_in_training_too() -> None:
    model = on_meta("googlenet", 1, 4, (32, 32), aux=False)
    assert model(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 4)


@pytest.mark.parametrize(
    ("side", "pixels"), [(28, 14), (32, 16), (47, 23), (48, 12), (64, 16), (96, 12), (224, 28)]
)
def test_googlenet_keeps_pixels_for_its_inceptions(side: int, pixels: int) -> None:
    model = on_meta("googlenet", 3, 4, (side, side))
    out = model.blocks[:2](torch.empty(1, 3, side, side, device="meta"))
    assert out.shape[2:] == (pixels, pixels)


def test_resnet_stem_follows_the_image() -> None:
    def stride(size: int, **options: str) -> int:
        stem = on_meta("resnet18", 3, 4, (size, size), **options).blocks[0]
        return size // stem(torch.empty(1, 3, size, size, device="meta")).shape[2]

    assert stride(64) == 1 and stride(96) == 4
    assert stride(224, stem="cifar") == 1 and stride(64, stem="imagenet") == 4


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_zero_init_residual_makes_blocks_pass_their_input(name: str) -> None:
    model = make(name, 3, 4, (8, 8), zero_init_residual=True).eval()
    block = dict(blocks(model))["layer1_1"]
    x = torch.rand(1, 64 if name == "resnet18" else 256, 8, 8)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "tanh"])
@pytest.mark.parametrize("pooling", ["max", "average"])
def test_lenet_options(activation: str, pooling: str) -> None:
    model = make("lenet5", 1, 10, (28, 28), activation=activation, pooling=pooling)
    kinds = {type(module).__name__.lower() for module in model.modules()}
    assert activation in kinds and {"max": "maxpool2d", "average": "avgpool2d"}[pooling] in kinds
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_dropout_is_absent_unless_asked_for() -> None:
    def dropouts(name: str, size: int, **options: float) -> list[float]:
        model = on_meta(name, 1, 4, (size, size), **options)
        return [module.p for module in model.modules() if isinstance(module, nn.Dropout)]

    assert dropouts("emotion48", 48) == []
    assert dropouts("emotion48", 48, dropout=0.25) == [0.25]
    assert dropouts("alexnet", 64) == dropouts("vgg11", 32) == [0.5, 0.5]
    assert dropouts("vgg11", 32, dropout=0) == []


def test_blocks_of_other_modules() -> None:
    relu = nn.ReLU()
    chain = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert [name for name, _ in blocks(chain)] == ["0", "1", "2", "3"]  # the shared ReLU counts twice

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(2, 2))  # not all there is, as in timm's transformers
            self.head = nn.Linear(2, 1)

    other = Other()
    assert blocks(other) == [("model", other)]


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", model_names())
def test_gradients_repeat_on_a_gpu(
    name: str, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    height, width = SMALL[name][-1]
    x = torch.randn(8, 3, height, width).cuda().to(memory_format=memory_format)

    def gradients() -> list[torch.Tensor]:
        model = make(name, 3, 10, (height, width)).cuda().to(memory_format=memory_format)
        torch.manual_seed(1)  # for dropout
        out = model(x)
        sum(logits.square().mean() for logits in (out if isinstance(out, tuple) else (out,))).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.use_deterministic_algorithms(True)
    try:
        first, again = gradients(), gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
