"""Evaluation counts every sample once, whatever the block, and leaves the weights as they were."""

from copy import deepcopy

import pytest
import torch
from small import small_run, train
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.data.augment import Augment
from lockstep.data.store import MemorySplit
from lockstep.kernels.loss import CrossEntropy
from lockstep.kernels.numerics import half_precision, half_type
from lockstep.kernels.triton.conv.tile_table import find_table
from lockstep.lower.compiled.compiled_eval import CompiledEval
from lockstep.lower.compiled.compiled_program import find_compiled
from lockstep.lower.fused.chain_program import find_chain
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.program import DeviceLowering
from lockstep.models.tensors import float_state
from lockstep.spec import Run, Train
from lockstep.train.device import prefetch as images
from lockstep.train.evaluation.evaluate import place_evaluator
from lockstep.train.evaluation.host_evaluate import Evaluation, Evaluator, averaged_weights

CPU = torch.device("cpu")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def split(length: int) -> MemorySplit:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (length, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return MemorySplit(images, torch.randint(0, 3, (length,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3)
    )


def augment() -> Augment:
    return Augment.parse(["flip", "crop"], 0, 4, (0.5,), (0.25,))


def evaluate(model: nn.Module, length: int, block: int, bf16: bool = False) -> Evaluation:
    run = Run(train=Train(batch=block, lanes=1, precision="bf16" if bf16 else "fp32"))
    return Evaluator(run, split(length), augment(), F.cross_entropy, CPU)(model)


@pytest.mark.parametrize(("length", "block"), [(40, 8), (37, 8), (41, 8), (3, 8), (37, 1), (37, 37)])
def test_every_sample_counts_once(length: int, block: int) -> None:
    model = network()
    result = evaluate(model, length, block)
    data = split(length)
    logits = model.eval()(augment().normalize(data.images)).detach()
    assert result.samples == length
    assert result.correct == int((logits.argmax(1) == data.labels).sum())
    assert result.loss == pytest.approx(float(F.cross_entropy(logits, data.labels)), rel=1e-5)
    assert result.accuracy == result.correct / length


def test_the_mode_before_does_not_matter_and_buffers_stay() -> None:
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = evaluate(model.train(), 37, 8)
    assert evaluate(model.eval(), 37, 8) == first
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_loss_is_a_tree_over_blocks() -> None:
    model = network()
    data = split(12)
    model.eval()
    blocks = [slice(0, 4), slice(4, 8), slice(8, 12)]
    with torch.no_grad():
        parts = [
            F.cross_entropy(model(augment().normalize(data.images[b])), data.labels[b]) * 4 for b in blocks
        ]
    assert evaluate(model, 12, 4).loss == float(((parts[0] + parts[1]) + parts[2]) / 12)


def test_bf16_evaluates_close_to_fp32() -> None:
    fp32, bf16 = evaluate(network(), 37, 8), evaluate(network(), 37, 8, bf16=True)
    assert fp32.loss != bf16.loss
    assert bf16.loss == pytest.approx(fp32.loss, rel=0.02)


def test_averaged_weights_are_used_inside_and_restored_outside() -> None:
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    average = {name: tensor + 1 for name, tensor in float_state(model).items()}
    with averaged_weights(model, average):
        assert all(torch.equal(v, average[k]) for k, v in float_state(model).items())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(average[k], before[k] + 1) for k in average)


def test_averaged_weights_are_restored_after_an_error() -> None:
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    average = {name: tensor * 0 for name, tensor in float_state(model).items()}
    with pytest.raises(RuntimeError, match="stop"), averaged_weights(model, average):
        raise RuntimeError("stop")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_without_averages_the_model_is_left_alone() -> None:
    model = network()
    before = model[0].weight.clone()
    with averaged_weights(model, {}):
        assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("kind", ["fused", "compiled"])
def test_evaluation_on_the_device_is_the_same_bits_however_it_runs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of lanes, also missing blocks; images that do not fit; weights that change."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)]
    if kind == "compiled":
        layers[1:2] = [nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)]
    model, other = nn.Sequential(*layers).to(DEVICE), nn.Sequential(*deepcopy(layers)).to(DEVICE)
    nn.init.normal_(other[-1].weight)
    found = set[tuple[Evaluation, Evaluation]]()
    for lanes, fits in ((1, True), (2, True), (4, True), (2, False), (4, False)):
        monkeypatch.setattr(images, "fits", lambda _, device, fits=fits: fits)
        train = Train(batch=2 * lanes, lanes=lanes)
        program = find_chain(model, (1, 4, 4)) or find_compiled(model, (1, 4, 4), train)
        stock = Evaluator(Run(train=train), split(11), augment(), CrossEntropy(), DEVICE)
        LaneByLane(model.train(), CrossEntropy(), 0, half=None)  # its dropouts have keys as in training
        on_device = place_evaluator(stock, DeviceLowering(program, find_table(DEVICE), train, DEVICE))
        found.add((on_device(model), on_device(other)))
        assert on_device(model).loss == pytest.approx(stock(model).loss, rel=1e-5)
    ((one, two),) = found
    assert one.loss != two.loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inference_by_stock_kernels_is_the_model_in_every_bit(precision: str) -> None:
    """Its products have their weights in the type that autocast casts to."""
    model = network().to(DEVICE, memory_format=torch.channels_last).eval()
    train = Train(batch=6, lanes=2, precision=precision)
    program = find_compiled(model, (1, 4, 4), train, trains=False)
    inference = CompiledEval(program.model, 5, train, DEVICE)
    nn.init.normal_(model[0].weight)
    inference.load(model)
    given = augment().normalize(split(5).images.to(DEVICE))
    inference.x[0].copy_(given.permute(0, 2, 3, 1))
    inference.forward()
    with half_precision(DEVICE, half_type(precision)):
        expected = model(given.contiguous(memory_format=torch.channels_last))
    assert torch.equal(inference.logits, expected.float())


class Counts(nn.Module):
    """Counts its calls, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x.flatten(1))


def test_what_a_module_counts_in_eval_mode_is_not_kept(tmp_path) -> None:
    """Workers evaluate other images, so their buffers would differ."""
    result, _ = train(small_run("data.size=8", "train.epochs=2"), tmp_path, model=Counts())
    kept = lockstep.load(result.directory, Counts()).calls
    assert kept == result.summary["steps"]
