"""A model lowered to fused kernels against itself in float64, by Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from images import bordered
from tf32 import in_tf32
from tiny_resnet import TinyResNet
from torch import Tensor, nn

from lockstep.comm.tree import LaneTree, worker_lanes
from lockstep.data.augment import Augment
from lockstep.data.loader import Lanes
from lockstep.data.store import MemorySplit
from lockstep.errors import SpecError
from lockstep.kernels.loss import CrossEntropy
from lockstep.kernels.numerics import half_type, plain_torch, prepare_device
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import Tile
from lockstep.kernels.triton.conv.tile_table import OPERATIONS, Table, find_table, tile_key
from lockstep.lower.compiled import conv_probe as at_once
from lockstep.lower.compiled.compiled_program import find_compiled
from lockstep.lower.device_lanes import DeviceLanes
from lockstep.lower.fused.chain_program import find_chain
from lockstep.lower.fused.residual_eval import ResidualEval
from lockstep.lower.fused.residual_network import ResidualNetwork
from lockstep.lower.fused.residual_program import ResidualProgram, find_residual
from lockstep.lower.lane_by_lane import LaneByLane, LaneOutput
from lockstep.lower.program import DeviceLowering, Program
from lockstep.models import build
from lockstep.models.resnet import BasicBlock, Bottleneck
from lockstep.spec import Run, Train
from lockstep.train.evaluation.evaluate import place_evaluator
from lockstep.train.evaluation.host_evaluate import Evaluator

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ERRORS = {"fp32": 2e-6, "tf32": 2e-3, "bf16": 3e-2}


@pytest.fixture(autouse=True)
def as_training() -> Iterator[None]:
    with plain_torch():
        prepare_device("auto", 1)
        yield


def make(
    name: str, shape: tuple[int, int, int], lanes: int, size: int, seed: int = 0
) -> tuple[nn.Module, Lanes]:
    torch.manual_seed(seed)
    model = build(name, in_channels=shape[0], num_classes=10, image_size=shape[1:], options={}).to(DEVICE)
    images, labels = torch.randn(lanes * size, *shape), torch.randint(0, 10, (lanes * size,))
    return model, Lanes(images.to(DEVICE), labels.to(DEVICE), lanes)


BOX = Tile(16, 16, 16, warps=1, stages=1, parts=2, boxes=True)


def in_boxes(layers: Sequence[Layer], kind: str) -> Table:
    """Small boxes of pixels for convolutions, as `bf16` has large ones on a GPU; perhaps not for all."""
    names = [name for name in OPERATIONS if kind in ("boxes", f"boxes, {name}")]
    return Table({tile_key(name, layer, "fp32"): BOX for layer in layers for name in names})


def fuse(
    model: nn.Module, lanes: Lanes, precision: str, smoothing: float = 0.0, kind: str = "fused"
) -> DeviceLanes:
    shape = tuple(lanes.images.shape[1:])
    image = shape[0], shape[1], shape[2]
    program: Program | None = find_chain(model, image) or find_residual(model, image)
    table = find_table(DEVICE)
    if "boxes" in kind:
        assert isinstance(program, ResidualProgram)
        table = in_boxes(program.layers, kind)
    train = Train(
        batch=len(lanes.labels), lanes=lanes.num_lanes, precision=precision, label_smoothing=smoothing
    )
    if "compiled" in kind:
        program = find_compiled(model, image, train)
    assert program
    return DeviceLanes(model, DeviceLowering(program, table, train, DEVICE), 0)


def total(outputs: list[LaneOutput]) -> list[Tensor]:
    """Loss, gradients and buffers summed over lanes, then all logits."""
    each = ([o.loss, *o.grads, *o.float_buffers] for o in outputs)
    sums = [torch.stack(tensors).sum(0) for tensors in zip(*each, strict=True)]
    return [*sums, torch.cat([o.logits for o in outputs])]


def compare(
    model: nn.Module, lanes: Lanes, precision: str, smoothing: float = 0.0, kind: str = "fused"
) -> None:
    check(
        total(list(fuse(model, lanes, precision, smoothing, kind).run(lanes, 0))),
        model,
        lanes,
        precision,
        smoothing,
    )


def check(
    found: list[Tensor], model: nn.Module, lanes: Lanes, precision: str = "fp32", smoothing: float = 0.0
) -> None:
    """Against the model itself in float64; a few times as far from it as stock kernels are is near enough.

    In tf32, which stock kernels use for few of these layers: as float64 is that reads operands as tf32 does.
    The largest of a window is then another one now and then, in one window of 500 for lenet5.
    """
    double = Lanes(lanes.images.double(), lanes.labels, lanes.num_lanes)
    exact = LaneByLane(deepcopy(model).double(), CrossEntropy(smoothing), 0, half=None)
    cut = precision == "tf32"
    usual = LaneByLane(
        in_tf32(deepcopy(model).double()) if cut else deepcopy(model),
        CrossEntropy(smoothing),
        0,
        half=half_type(precision),
    )
    names = ["loss", *exact.params, *exact.float_names(), "logits"]
    rows = zip(
        found,
        total(list(usual.run(double if cut else lanes, 0))),
        total(list(exact.run(double, 0))),
        strict=True,
    )
    for name, (one, near, other) in zip(names, rows, strict=True):
        error, limit = (
            float((x.double() - other).norm() / other.norm().clamp_min(1e-30)) for x in (one, near)
        )
        assert error < ERRORS[precision] + 4 * limit, (name, error, limit)


@pytest.mark.parametrize(("name", "shape"), [("emotion48", (1, 8, 9)), ("lenet5", (1, 13, 12))])
def test_a_model_is_the_reference(name: str, shape: tuple[int, int, int]) -> None:
    compare(*make(name, shape, 2, 3), "fp32", smoothing=0.1)


def tiny(lanes: int, size: int, side: int = 7, whole: bool = True) -> tuple[nn.Module, Lanes]:
    """With every kind of block, or with one that has a stride and a projection.

    By a seed for which no gradient nearly cancels, so that its error is not far larger than others'.
    """
    torch.manual_seed(2)
    first, more = BasicBlock(8, 16, 2), [BasicBlock(16, 16, 1), Bottleneck(16, 4, 1), Bottleneck(16, 6, 2)]
    model = TinyResNet(first, *more * whole, channels=24 if whole else 16).to(DEVICE)
    images = torch.randn(lanes * size, 3, side, side, device=DEVICE)
    return model, Lanes(images, torch.arange(lanes * size, device=DEVICE) % 10, lanes)


def chain(lanes: int) -> tuple[nn.Module, Lanes]:
    """Three layers, one with pooling; images of one sample a lane."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 6), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(6, 10)).to(DEVICE)
    images = torch.randn(lanes, 3, 3, 3, device=DEVICE)
    return model, Lanes(images, torch.arange(lanes, device=DEVICE), lanes)


@pytest.fixture
def own_stem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kind of `compiled, own stem`, kernels of ours for the first convolution, as `bf16` has them."""
    if "own stem" in request.getfixturevalue("kind"):
        monkeypatch.setattr(at_once, "OWN_TYPES", (torch.float32,))


@pytest.mark.parametrize("kind", ["fused", "compiled", "compiled, own stem"])
@pytest.mark.usefixtures("own_stem")
def test_a_residual_network_is_the_reference(kind: str) -> None:
    compare(*tiny(2, 3), "fp32", smoothing=0.1, kind=kind)


@pytest.mark.parametrize("kind", ["fused", "boxes"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_norms_over_all_lanes_are_those_of_the_batch(lanes: int, kind: str) -> None:
    model, images = tiny(lanes, 4 // lanes, side=8, whole=False)
    lowering = fuse(model, images, "fp32", kind=kind)._lowering
    fused = DeviceLanes(model, replace(lowering, train=replace(lowering.train, sync_norm=True)), 0)
    *sums, logits = total(list(fused.run(images, 0)))
    check([*(tensor / lanes for tensor in sums), logits], model, Lanes(images.images, images.labels, 1))


@pytest.mark.parametrize("kind", ["boxes", "boxes, input_grad", "boxes, weight_grad"])
def test_a_residual_network_in_boxes_is_the_reference(kind: str) -> None:
    """One block by boxes of an image, then one by boxes of four, which have images of two lanes."""
    torch.manual_seed(0)
    model = TinyResNet(BasicBlock(8, 16, 2), BasicBlock(16, 32, 2), channels=32).to(DEVICE)
    images = torch.randn(6, 3, 8, 8, device=DEVICE)
    compare(model, Lanes(images, torch.arange(6, device=DEVICE), 2), "fp32", smoothing=0.1, kind=kind)


@pytest.mark.parametrize("kind", ["fused", "boxes"])
def test_running_statistics_end_a_unit_in_one_launch(kind: str) -> None:
    """On buffers that units share, again and again; by boxes of an image and of several."""
    torch.manual_seed(0)
    blocks = BasicBlock(8, 16, 1), BasicBlock(16, 16, 1), Bottleneck(16, 16, 2), BasicBlock(64, 16, 2)
    model = TinyResNet(*blocks, channels=16).to(DEVICE).eval()
    for buffer in model.buffers():
        buffer.add_(torch.rand(buffer.shape, device=DEVICE).to(buffer.dtype))
    lanes = Lanes(torch.zeros(6, 3, 8, 8, device=DEVICE), torch.arange(6, device=DEVICE), 2)
    network, load = fuse(model, lanes, "fp32", kind=kind)._lowering.eval_network(2)
    assert isinstance(network, ResidualEval)
    assert len(network._z) == (3 if "boxes" in kind else len(network._y))
    assert len({y.data_ptr() for y in network._y}) < len(network._y)
    load(model)
    for seed in (1, 2):
        images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        network.x[0].copy_(bordered(images, network.pad))
        network.forward()
        expected = deepcopy(model).double()(images.double())
        assert (network.logits - expected).norm() < 1e-5 * expected.norm()


def test_sums_of_a_norms_gradient_come_with_its_last_part() -> None:
    """By an identity, a projection and a stride, in boxes of one lane's images"""
    torch.manual_seed(0)
    blocks = BasicBlock(8, 16, 1), BasicBlock(16, 16, 1), BasicBlock(16, 32, 2)
    model = TinyResNet(*blocks, channels=32).to(DEVICE)
    images = torch.randn(4, 3, 8, 8, device=DEVICE)
    lanes = Lanes(images, torch.arange(4, device=DEVICE), 2)
    network = fuse(model, lanes, "fp32", kind="boxes").network(2)
    assert isinstance(network, ResidualNetwork)
    assert sum(map(bool, network._sum_sizes)) >= 5
    compare(model, lanes, "fp32", kind="boxes")


@pytest.mark.parametrize("kind", ["chain", "fused", "boxes"])
def test_what_runs_beside_may_run_last(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, as on a CPU, or all of it at the end: whenever a GPU gets to it, it finds what it reads."""
    model, lanes = chain(2) if kind == "chain" else tiny(2, 1, side=8, whole=False)
    usual = total(list(fuse(model, lanes, "fp32", kind=kind).run(lanes, 0)))
    later: list[Callable[[], None]] = []

    @contextmanager
    def put_off(*_: object, **__: object) -> Iterator[Callable[[Callable[[], None]], None]]:
        yield later.append
        for compute in later:
            compute()

    for name in ("chain", "residual"):
        monkeypatch.setattr(f"lockstep.lower.fused.{name}_network.beside", put_off)
    found = total(list(fuse(model, lanes, "fp32", kind=kind).run(lanes, 0)))
    assert len(later) > 2
    assert all(torch.equal(a, b) for a, b in zip(usual, found, strict=True))


def frozen(model: TinyResNet) -> None:
    next(model.parameters()).requires_grad_(False)


def hooked(model: TinyResNet) -> None:
    model.blocks[1].register_forward_hook(lambda *_: None)


def more_at_the_end(model: TinyResNet) -> None:
    model.blocks[-1].insert(1, nn.Dropout(0.5))


def another_parameter(model: TinyResNet) -> None:
    model.register_parameter("more", nn.Parameter(torch.zeros(3)))


def reflects(model: TinyResNet) -> None:
    model.blocks[0][0].padding_mode = "reflect"


def projects_through_relu(model: TinyResNet) -> None:
    model.blocks[1].shortcut.append(nn.ReLU())


def norms_twice(model: TinyResNet) -> None:
    model.blocks[0].append(nn.BatchNorm2d(8))


@pytest.mark.parametrize(
    "change",
    [frozen, hooked, more_at_the_end, another_parameter, reflects, projects_through_relu, norms_twice],
)
def test_other_residual_networks_are_left_to_stock_kernels(
    change: Callable[[TinyResNet], None],
) -> None:
    model = TinyResNet(BasicBlock(8, 16, 2), channels=16)
    assert find_residual(model, (3, 7, 7))
    change(model)
    assert find_residual(model, (3, 7, 7)) is None


def test_a_residual_network_counts_its_batches() -> None:
    model, lanes = tiny(2, 1, side=3, whole=False)
    for output in fuse(model, lanes, "fp32").run(lanes, 0):
        assert output.int_buffers and all(count == 1 for count in output.int_buffers)
    assert all(not b.any() for name, b in model.named_buffers() if name.endswith("running_mean"))


@pytest.mark.parametrize("kind", ["chain", "fused", "boxes", "compiled", "compiled, own stem"])
@pytest.mark.usefixtures("own_stem")
def test_gradients_are_the_same_at_any_number_of_workers(kind: str) -> None:
    """Each worker's lanes by themselves, joined in the lane tree: every bit of all they give."""
    side = 8 if kind == "boxes" else 3
    model, lanes = chain(8) if kind == "chain" else tiny(8, 1, side, whole=False)
    fused = fuse(model, lanes, "fp32", kind=kind)
    found = []
    for workers in (1, 2, 3, 4, 8):
        tree = LaneTree()
        for own in (worker_lanes(8, workers, rank) for rank in range(workers)):
            fused.network(len(own))  # with buffers for its own lanes only, as a worker has it
            for output in fused.run(lanes.range(own.start, len(own)), 0):
                tree.add([output.loss, *output.grads, *output.float_buffers], output.height)
        found.append(tree.root()[1])
    for sums in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], sums, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize(
    ("name", "side"), [("emotion48", 48), ("vgg11", 32), ("lenet5", 28), ("resnet18", 32)]
)
def test_a_whole_model_on_the_gpu(name: str, side: int, precision: str) -> None:
    if name == "resnet18" and precision == "fp32":
        pytest.skip("its kernels in fp32 take minutes to compile")
    # few samples, and a seed that leaves no two largest values of a window of lenet5 within rounding
    compare(*make(name, (1 if name == "emotion48" else 3, side, side), 4, 8, seed=5), precision)


@pytest.mark.parametrize(
    ("kind", "length", "lanes", "size"), [("c", 7, 2, 2), ("c", 3, 4, 1), ("r", 5, 2, 2)]
)
def test_evaluation_is_the_stock_one(kind: str, length: int, lanes: int, size: int) -> None:
    model, channels = (
        (make("emotion48", (1, 8, 8), 1, 1)[0], 1) if kind == "c" else (tiny(1, 1, whole=False)[0], 3)
    )
    for buffer in model.buffers():
        buffer.add_(torch.rand(buffer.shape, device=DEVICE).to(buffer.dtype))
    images = torch.randint(0, 256, (length, channels, 8, 8), dtype=torch.uint8)
    split = MemorySplit(images, torch.arange(length) % 10)
    train = Train(batch=lanes * size, lanes=lanes)
    run, augment, loss = (
        Run(train=train),
        Augment(0, False, 0, 0, (0.5,) * channels, (0.3,) * channels),
        CrossEntropy(),
    )
    program = find_chain(model, (1, 8, 8)) or find_residual(model, (3, 8, 8))
    assert program
    lowering = DeviceLowering(program, find_table(DEVICE), train, DEVICE)
    evaluator = Evaluator(run, split, augment, loss, DEVICE)
    stock, fused = evaluator(model), place_evaluator(evaluator, lowering)(model)
    assert (fused.correct, fused.samples) == (stock.correct, stock.samples)
    assert fused.loss == pytest.approx(stock.loss, rel=1e-5)


CHAINS = {
    "dropout without ReLU": ([nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3)], False),
    "fully connected": ([nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)], True),
    "stride": ([nn.Conv2d(1, 2, 3, stride=2), nn.Flatten(), nn.Linear(18, 3)], False),
    "no bias": ([nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), nn.Linear(72, 3)], False),
    "ReLU at the end": ([nn.Flatten(), nn.Linear(64, 3), nn.ReLU()], False),
    "pooling by three": ([nn.Conv2d(1, 2, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(8, 3)], False),
    "no flattening": ([nn.Conv2d(1, 2, 8), nn.Linear(1, 3)], False),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_a_chain(name: str) -> None:
    layers, is_one = CHAINS[name]
    assert (find_chain(nn.Sequential(*layers), (1, 8, 8)) is not None) == is_one


def test_a_bias_before_its_weight_is_no_chain() -> None:
    layer = nn.Linear(64, 3)
    weight = layer.weight
    del layer.weight
    layer.weight = weight  # as prune.remove leaves it
    assert find_chain(nn.Sequential(nn.Flatten(), layer), (1, 8, 8)) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('"forward 8x8x1-4 3x3 pool2 bf16" = [16, 32, 16]', "at least 32 rows"),
        ('"forward 8x8x1-4 3x3 pool1 bf16" = [32, 8, 16]', "at least 16"),
        ('"forward 8x8x1-4 3x3 pool1 bf16" = [48, 32, 16]', "power of two"),
        ('"forward 8x8x1-4 3x3 pool1 bf16" = [32, 32, 16, 4, 2, 1, 2]', "must be 0 or 1"),
        ('"forward" = "wide"', "invalid literal"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.toml"
    path.write_text(f"[tiles]\n{line}\n")
    with pytest.raises(SpecError, match=why):
        find_table(DEVICE, path)
