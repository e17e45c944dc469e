"""Weights from a file: by name, whole or not at all, with a head of another size left alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.models import build, load_weights
from lockstep.models.weights import head_names


def small(classes: int = 3, name: str = "lenet5", size: int = 28, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(name, in_channels=1, num_classes=classes, image_size=(size, size))


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def as_checkpoint(model: nn.Module, averaged: bool = False) -> dict[str, Tensor]:
    state = model.state_dict()
    groups = {"model": state, "ema": {k: v + 1 for k, v in state.items()} if averaged else {}}
    named = {f"{group}.{name}": tensor for group, part in groups.items() for name, tensor in part.items()}
    return {**named, "optimizer.momentum.x": torch.zeros(2)}


def refusal(model: nn.Module, path: Path) -> str:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        load_weights(model, path)
    assert equal(before, model.state_dict()), "a refused file must change nothing"
    text = str(caught.value)
    assert text.startswith(f"model.weights={path}: ") and "\n" not in text
    return text


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["lenet5", "resnet18"])  # the second has buffers
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_parameters_and_buffers_are_loaded(tmp_path: Path, name: str, kind: str) -> None:
    source, target = small(name=name, seed=1), small(name=name, seed=2)
    for buffer in source.buffers():
        buffer.add_(1)
    tensors = as_checkpoint(source) if kind == "checkpoint" else source.state_dict()
    assert load_weights(target, save(tmp_path / "w.safetensors", tensors)) == []
    assert equal(source.state_dict(), target.state_dict())


def test_averaged_weights_are_taken_where_there_are_any(tmp_path: Path) -> None:
    source, target = small(seed=1), small(seed=2)
    load_weights(target, save(tmp_path / "w.safetensors", as_checkpoint(source, averaged=True)))
    assert equal({name: tensor + 1 for name, tensor in source.state_dict().items()}, target.state_dict())


def test_half_precision_is_widened(tmp_path: Path) -> None:
    source, target = small(seed=1), small(seed=2)
    path = save(tmp_path / "w.safetensors", {k: v.bfloat16() for k, v in source.state_dict().items()})
    load_weights(target, path)
    weight = target.state_dict()["blocks.classifier.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, source.state_dict()["blocks.classifier.weight"].bfloat16().float())


def test_head_of_another_size_is_left_as_initialized(tmp_path: Path) -> None:
    source, target = small(classes=5, seed=1), small(classes=3, seed=2)
    fresh = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    reset = load_weights(target, save(tmp_path / "w.safetensors", as_checkpoint(source)))
    assert reset == ["blocks.classifier.weight", "blocks.classifier.bias"]
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, fresh[name] if name in reset else source.state_dict()[name])


def test_auxiliary_heads_count_as_heads(tmp_path: Path) -> None:
    source, target = small(5, "googlenet", 32, seed=1), small(3, "googlenet", 32, seed=2)
    reset = load_weights(target, save(tmp_path / "w.safetensors", source.state_dict()))
    heads = ("blocks.classifier.2", "aux.inception4a.4", "aux.inception4d.4")
    assert reset == [f"{head}.{part}" for head in heads for part in ("weight", "bias")]


def test_another_shape_elsewhere_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors", small(size=36, seed=1).state_dict())
    text = refusal(small(size=28), path)
    assert "blocks.hidden1.1.weight is [120, 576] in the file and [120, 400] in the model" in text
    assert "set data.size" in text


def test_missing_and_surplus_names_are_refused(tmp_path: Path) -> None:
    tensors = dict(small().state_dict())
    bias = tensors.pop("blocks.classifier.bias")
    assert "lacks blocks.classifier.bias: set model.name" in refusal(small(), save(tmp_path / "a", tensors))
    tensors.pop("blocks.classifier.weight")
    tensors["other.bias"] = bias
    text = refusal(small(), save(tmp_path / "b", tensors))
    assert "lacks blocks.classifier.bias and 1 more and has other.bias, which the model has not" in text


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors", as_checkpoint(small(name="emotion48", size=48)))
    assert "set model.name and its options" in refusal(small(), path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in refusal(small(), tmp_path / "none.safetensors")
    assert "is a folder" in refusal(small(), tmp_path)
    pickled, empty, cut = tmp_path / "model.pt", tmp_path / "empty", tmp_path / "cut"
    torch.save(small().state_dict(), pickled)
    empty.touch()
    whole = save(tmp_path / "w.safetensors", small().state_dict()).read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    text = refusal(small(), pickled)
    assert "torch.load with weights_only=True, and write model.safetensors by" in text
    for path in (empty, cut):
        assert "not a readable safetensors file" in refusal(small(), path)


def test_a_module_that_calls_its_own_part_model(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

    source, target = Wrapper(), Wrapper()
    load_weights(target, save(tmp_path / "export", source.state_dict()))
    assert equal(source.state_dict(), target.state_dict())
    target = Wrapper()
    load_weights(target, save(tmp_path / "checkpoint", as_checkpoint(source)))
    assert equal(source.state_dict(), target.state_dict())


def test_head_of_modules_that_are_not_ours() -> None:
    chain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), nn.LogSoftmax(1))
    assert head_names(chain) == {"1.weight", "1.bias"}
    assert head_names(nn.Linear(2, 3)) == {"weight", "bias"}
    assert head_names(nn.ReLU()) == set()
