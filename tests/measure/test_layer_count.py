"""Layers are counted as the literature counts them, and timed one by one; the model stays as it was."""

import pytest
import torch
from torch import nn

from lockstep.measure.layer_count import count_layers, watch_layers
from lockstep.measure.layer_time import LayerTimer
from lockstep.models import build_model
from lockstep.spec import Model, Run


def layers_of(name, size, classes=1000):
    return count_layers(build_model(Run(model=Model(name)), (3, size, size), classes), (3, size, size))


@pytest.mark.parametrize(
    ("name", "macs", "parameters"),
    [("alexnet", 0.72e9, 60.97e6), ("resnet18", 1.81e9, 11.69e6), ("resnet50", 4.09e9, 25.56e6)],
)
def test_known_counts(name, macs, parameters):
    """Multiplications and parameters at 224 pixels and 1000 classes, as published."""
    layers = layers_of(name, 224)
    assert sum(layer.macs for layer in layers) == pytest.approx(macs, rel=0.02)
    assert sum(layer.parameters for layer in layers) == pytest.approx(parameters, rel=0.001)


def test_what_a_layer_is():
    layers = {layer.name: layer for layer in layers_of("resnet18", 32, 10)}
    first = layers["blocks.stem.0"]
    assert (first.kind, first.rows, first.channels, first.halo, first.groups) == ("convolution", 32, 64, 1, 1)
    assert first.macs == 32 * 32 * 64 * 27 and first.inputs == 3 * 32 * 32 and first.outputs == 64 * 32 * 32
    assert {layer.kind for layer in layers.values()} >= {
        "convolution",
        "norm",
        "fully connected",
        "activation",
    }


def test_a_shared_layer_has_its_parameters_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(self.conv(x))

    first, second = count_layers(Twice(), (3, 8, 8))
    assert first.parameters == 84 and second.parameters == 0 and second.name == "conv (2)"
    assert first.macs == second.macs


def test_the_model_is_not_changed():
    model = build_model(Run(model=Model("resnet18")), (3, 32, 32), 10).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    count_layers(model, (3, 32, 32))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training and torch.equal(state, torch.random.get_rng_state())


def test_times_of_whole_layers_and_parts():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=2, padding=1),
        nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 8 * 8, 10),
    )  # fmt: skip
    timer = LayerTimer(half=None, rounds=1)
    parts = [("channel", 2), ("spatial", 2)]
    layers = [timer.time(call, parts) for call in watch_layers(model, torch.rand(2, 3, 16, 16))]
    times = {layer.name: {time.part: time for time in layer.times} for layer in layers}
    assert set(times["2"]) == {"", "channel=2", "spatial=2"} and set(times["1"]) == {""}
    assert set(times["6"]) == {"", "channel=2"}
    assert all(time.forward_s > 0 for own in times.values() for time in own.values())
    assert times["2"][""].backward_s > 0 and times["2"]["channel=2"].images == 2
