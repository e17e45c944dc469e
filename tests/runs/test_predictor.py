"""A trained run as a function of images: the probabilities of the model itself."""

import numpy as np
import pytest
import torch
from small import small_run, train
from tiny_resnet import TinyResNet
from torch import nn

import lockstep
from lockstep.errors import BadInput, CheckpointError
from lockstep.lower.compiled.compiled_eval import CompiledEval
from lockstep.lower.fused.residual_eval import ResidualEval
from lockstep.models.resnet import BasicBlock
from lockstep.runs import predictor as predict
from lockstep.runs.predictor import fold_norms

SIZES = (
    "data.size=8",
    "data.num_train=8",
    "data.num_test=4",
    "train.batch=4",
    "train.lanes=2",
    "train.epochs=1",
)


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))


def residual():
    torch.manual_seed(0)
    return TinyResNet(BasicBlock(8, 8, 2), channels=8, colours=1)


def expected(result, model, images):
    """By the plain model, in float64; images as the data set normalizes them."""
    found = lockstep.load(result.directory, model=model())
    trained = lockstep.predictor(result.directory, device="cpu", model=model())._trained
    return found.double()(trained.augment.normalize(images).double()).softmax(1)


@pytest.mark.parametrize("kernels", ["auto", "fused", "compiled"])
@pytest.mark.parametrize("model", [tiny, residual])
def test_it_gives_the_probabilities_of_the_model(model, kernels, tmp_path):
    result, _ = train(small_run(*SIZES, f"kernels.set={kernels}"), tmp_path, model=model())
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    predictor = lockstep.predictor(result.directory, device="cpu", model=model())
    found = predictor(images)
    assert len(predictor.classes) == 10 and predictor.classes[:2] == ("disc", "ring")
    assert found.shape == (3, 10) and torch.allclose(
        found.double(), expected(result, model, images), atol=1e-5
    )


def test_many_images_of_a_residual_network_take_fused_kernels(tmp_path, monkeypatch):
    """And few of them stock ones, with the same probabilities."""
    result, _ = train(small_run(*SIZES, "kernels.set=fused"), tmp_path, model=residual())
    monkeypatch.setattr(predict, "_MANY", 3)
    monkeypatch.setattr(predict, "_PAYS", ("fp32",))
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    predictor = lockstep.predictor(result.directory, device="cpu", model=residual())
    for size in (2, 4):
        assert torch.allclose(
            predictor(images[:size]).double(), expected(result, residual, images[:size]), atol=1e-5
        )
    kinds = {size: type(run._network) for size, run in predictor._runs.items()}
    assert kinds == {2: CompiledEval, 4: ResidualEval}


@pytest.mark.parametrize(("kernels", "limit"), [("fused", "_CHAIN_VALUES"), ("compiled", "_OTHER_VALUES")])
def test_any_number_of_images_at_a_time(kernels, limit, tmp_path, monkeypatch):
    result, _ = train(small_run(*SIZES, f"kernels.set={kernels}"), tmp_path, model=tiny())
    monkeypatch.setattr(predict, limit, 2 * 10 * 10 * 4 + 5)  # so a few images at a time
    monkeypatch.setattr(predict, "_KEPT", 1)
    images = torch.randint(0, 256, (7, 1, 8, 8), dtype=torch.uint8)
    predictor = lockstep.predictor(result.directory, device="cpu", model=tiny())
    with torch.inference_mode():  # what is kept from there serves outside of it too
        together = predictor(images).clone()
    one_by_one = torch.cat([predictor(image[None]) for image in images])
    assert torch.equal(together, one_by_one) or (
        kernels == "compiled" and torch.allclose(together, one_by_one)
    )
    assert predictor._most < 7 and len(predictor._runs) == 1 and predictor(images[:0]).shape == (0, 10)
    for wrong in (images.float(), images[:, :, 1:], images[0]):
        with pytest.raises(BadInput, match=r"images must be uint8 \[N, C, H, W\] with C × H × W = 1 × 8 × 8"):
            predictor(wrong)


def test_a_run_on_floats_takes_floats(tmp_path):
    images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = [(image, index % 10) for index, image in enumerate(images)]
    result, _ = train(small_run(*SIZES), tmp_path, model=tiny(), data=data)
    predictor = lockstep.predictor(result.directory, device="cpu", model=tiny())
    wanted = lockstep.load(result.directory, model=tiny())(images[:3]).softmax(1)
    assert torch.allclose(predictor(images[:3]), wanted, atol=1e-6)
    with pytest.raises(BadInput, match=r"images must be floats"):
        predictor(images.to(torch.uint8))


def test_norms_become_part_of_their_convolutions():
    model = residual().eval()
    for buffer in model.buffers():
        buffer.add_(torch.rand(buffer.shape).to(buffer.dtype))
    folded, images = fold_norms(model), torch.randn(2, 1, 9, 9)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()), (
        "the model itself is as it was"
    )
    assert torch.allclose(folded(images), model(images), atol=1e-5)


def test_what_cannot_be_used_is_refused(tmp_path):
    """Images that are no tensor; and a last checkpoint that is damaged, which is not passed over."""
    result, _ = train(small_run(*SIZES), tmp_path, model=tiny())
    with pytest.raises(BadInput, match="must be a torch tensor, not ndarray"):
        lockstep.predictor(result.directory, device="cpu", model=tiny())(np.zeros((1, 1, 8, 8), np.uint8))
    newest = max((result.directory / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"damaged.*give an older one by --checkpoint PATH"):
        lockstep.load(result.directory, model=tiny())
