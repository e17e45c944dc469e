"""`lockstep bench threads`: kernels against float64, the same bits at every T, tables, and bad input."""

import json
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from lab.cuda_on_cpu import needs_gxx, run_cuda_on_cpu
from torch import nn
from torch.nn import functional

from lockstep.cli.lab import threads, worker_runs
from lockstep.cli.lab.threads import tell_scaled
from lockstep.cli.main import run
from lockstep.errors import LockstepError
from lockstep.lab.threads import threads_bench
from lockstep.lab.threads.cuda_network import CudaNetwork
from lockstep.lab.threads.grid_kernel import KERNELS, GridKernel, kernel_source
from lockstep.lab.threads.threads_bench import (
    STEP,
    TRAINING,
    Pictures,
    Scaled,
    SkippedCount,
    ThreadWork,
    measure_threads,
)
from lockstep.native.nvrtc import NoCompiler, compile_cuda

CPU = torch.device("cpu")
CONVOLUTION = {"CI": 8, "CO": 16, "H": 4, "W": 4}
FIRST = {"CI": 1, "CO": 8, "H": 16, "W": 16}
HIDDEN = {"IN": 64, "OUT": 16, "PARTS": 16, "HAS_RELU": 1}
CLASSIFIER = {"IN": 16, "OUT": 7, "PARTS": 4, "HAS_RELU": 0}


def load_on_cpu(device, source, name, macros):
    return lambda grid, block, arguments: run_cuda_on_cpu(source, name, grid, block, arguments, macros)


def start(name, macros, *arguments):
    GridKernel(load_on_cpu, CPU, 64, name, macros)(*arguments)


def emotion(side=16, filters=(8, 8, 16), hidden=16, classes=7):
    """emotion48 with fewer filters, by the same names."""
    torch.manual_seed(0)
    channels, blocks = 1, OrderedDict()
    for number, count in enumerate(filters, 1):
        layers = nn.Conv2d(channels, count, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        blocks[f"block{number}"], channels = nn.Sequential(*layers), count
    features = channels * (side // 8) ** 2
    blocks["hidden"] = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU())
    blocks["classifier"] = nn.Linear(hidden, classes)
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(blocks)))


def close(found, expected):
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 2e-6


@needs_gxx
@pytest.mark.parametrize("macros", [FIRST, CONVOLUTION], ids=["first", "later"])
def test_convolution_against_float64(macros):
    channels, filters, side, images = macros["CI"], macros["CO"], macros["H"], 3
    x, weight = torch.randn(images, channels, side, side), torch.randn(filters, channels, 3, 3)
    bias, given = torch.randn(filters), torch.randn(images, filters, side, side)
    exact = [value.double().requires_grad_() for value in (x, weight, bias)]
    expected = functional.conv2d(*exact, padding=1)
    expected.backward(given.double())
    found = torch.empty_like(given)
    start("convolution_forward", macros, x, weight, bias, found, images)
    close(found, expected.detach())
    pixels = side * side
    weight_parts, bias_parts = torch.empty(weight.numel(), pixels), torch.empty(filters, pixels)
    start("convolution_weight_gradient", macros, x, given, weight_parts, bias_parts, images)
    weight_found, bias_found = torch.empty_like(weight), torch.empty_like(bias)
    start("add_parts", {}, weight_parts, weight_found, weight.numel(), pixels)
    start("add_parts", {}, bias_parts, bias_found, filters, pixels)
    close(weight_found, exact[1].grad)
    close(bias_found, exact[2].grad)
    if channels % 4 == 0:
        x_found = torch.empty_like(x)
        start("convolution_data_gradient", macros, given, weight, x_found, images)
        close(x_found, exact[0].grad)


@needs_gxx
@pytest.mark.parametrize("macros", [HIDDEN, CLASSIFIER], ids=["hidden", "classifier"])
def test_linear_against_float64(macros):
    inputs, outputs, images = macros["IN"], macros["OUT"], 5
    x, weight, bias = torch.randn(images, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    given = torch.randn(images, outputs)
    exact = [value.double().requires_grad_() for value in (x, weight, bias)]
    expected = functional.linear(*exact)
    expected = expected.relu() if macros["HAS_RELU"] else expected
    expected.backward(given.double())
    parts, found = torch.empty(images * outputs * macros["PARTS"]), torch.empty(images, outputs)
    start("linear_parts", macros, x, weight, parts, images)
    start("linear_sum", macros, parts, bias, found, images)
    close(found, expected.detach())
    if macros["HAS_RELU"]:
        start("relu_gradient", macros, found, given, images)
    gradients = [torch.empty_like(value) for value in (x, weight, bias)]
    start("linear_data_gradient", macros, given, weight, gradients[0], images)
    start("linear_weight_gradient", macros, x, given, gradients[1], images)
    start("linear_bias_gradient", macros, given, gradients[2], images)
    for value, each in zip(exact, gradients, strict=True):
        close(each, value.grad)


@needs_gxx
def test_pooling_loss_and_update_against_float64():
    values, given = torch.randn(6, 1, 16, 16).round(decimals=1), torch.randn(6, 1, 8, 8)  # some are equal
    exact = values.double().requires_grad_()
    expected = functional.max_pool2d(exact.relu(), 2)
    expected.backward(given.double())
    found = torch.empty_like(given)
    start("pooling_forward", {"H": 16, "W": 16}, values, found, 6)
    start("pooling_gradient", {"H": 16, "W": 16}, given, values, 6)
    close(found, expected.detach())
    close(values, exact.grad)

    scores, labels = 9 * torch.randn(5, 7), torch.tensor([0, 6, 3, 3, 1], dtype=torch.int32)
    exact = scores.double().requires_grad_()
    expected = functional.cross_entropy(exact, labels.long())
    expected.backward()
    losses, gradient, loss = torch.empty(5), torch.empty(5, 7), torch.empty(1)
    start("softmax_cross_entropy", {"CLASSES": 7}, scores, labels, losses, gradient, 5)
    start("add_parts", {}, losses, loss, 1, 5)
    close(loss, expected.detach())
    close(gradient, exact.grad)

    weight, gradient, velocity = torch.randn(3, 12)
    moved = 0.9 * velocity.double() + gradient.double()
    expected = weight.double() - 0.1 * moved
    start("update", {}, weight, gradient, velocity, 3, 0.1, 0.9)
    close(velocity, moved)
    close(weight, expected)


@needs_gxx
def test_steps_have_the_same_bits_at_every_number_of_threads():
    model, hashes, losses = emotion(), set(), set()
    images, labels = torch.randn(5, 1, 16, 16), torch.tensor([0, 6, 2, 2, 5])
    for count in (1, 4, 512):
        network = CudaNetwork(CPU, count, 8, model.state_dict(), momentum=0.9, load=load_on_cpu)
        losses.add(tuple(float(network.step(images, labels, 0.1)) for _ in range(2)))
        hashes.add(network.weights_sha256())
    assert len(hashes) == len(losses) == 1
    exact = model.double()
    optimizer = torch.optim.SGD(exact.parameters(), 0.1, momentum=0.9)
    for found in losses.pop():
        optimizer.zero_grad()
        loss = functional.cross_entropy(exact(images.double()), labels)
        loss.backward()
        optimizer.step()
        assert abs(found - loss.item()) < 1e-6
    for name, value in network.weights().items():
        close(value, exact.state_dict()[name])
    close(network.predict(images.repeat(4, 1, 1, 1)), exact(images.double()).detach().repeat(4, 1))


@needs_gxx
def test_the_bench_trains_and_leaves_out_what_takes_too_long():
    pictures = Pictures(torch.randn(24, 1, 16, 16), torch.arange(24) % 7)

    def found(patience_s, counts):
        work = ThreadWork(emotion().state_dict(), pictures, pictures, 1, 1, patience_s, load_on_cpu)
        return list(measure_threads(CPU, counts, work))

    rows = found(1e6, (1024, 16, 1))
    assert [(row.kind, row.count) for row in rows] == [(TRAINING, 1024), (STEP, 1024), (STEP, 16), (STEP, 1)]
    assert rows[0].accuracy is not None and rows[0].images == 24 and rows[1].loss == rows[3].loss
    assert len({row.weights_sha256 for row in rows[1:]}) == 1 != rows[0].weights_sha256
    rows = found(0.0, (4, 2, 1))
    assert isinstance(rows[0], Scaled) and all(isinstance(row, SkippedCount) for row in rows[1:])
    assert "would take up to" in rows[1].why


def test_without_nvrtc_the_bench_says_so():
    def refuse(*given):
        raise NoCompiler("NVRTC is not installed: pip install it\nmore")

    pictures = Pictures(torch.randn(8, 1, 16, 16), torch.arange(8) % 7)
    work = ThreadWork(emotion().state_dict(), pictures, pictures, 1, 1, 1.0, refuse)
    told = SkippedCount(STEP, 4, "NVRTC is not installed: pip install it")
    assert list(measure_threads(CPU, (1, 4), work)) == [told]


def test_what_the_threads_of_a_gpu_are_given(monkeypatch):
    given = []
    monkeypatch.setattr(threads_bench, "measure_threads", lambda *words: given.append(words) or [])
    monkeypatch.setattr(threads, "_TRAIN_IMAGES", 12)
    monkeypatch.setattr(threads, "_TEST_IMAGES", 3)
    threads._by_threads(Namespace(most=1000, steps=None, epochs=2), CPU)
    _, counts, work = given[0]
    assert counts == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] and (work.steps, work.epochs) == (3, 2)
    assert work.train.images.shape == (12, 1, 48, 48) and work.test.labels.shape == (3,)
    assert work.weights["blocks.hidden.1.weight"].shape == (256, 4608)


def test_networks_that_cannot_be_are_refused():
    weights = emotion().state_dict()
    with pytest.raises(LockstepError, match="300 threads: give 1 to 256, or a multiple of 256"):
        CudaNetwork(CPU, 300, 8, weights, load=load_on_cpu)
    network = CudaNetwork(CPU, 1, 2, weights, load=load_on_cpu)
    with pytest.raises(LockstepError, match="give 1 to 2 of"):
        network.step(torch.randn(3, 1, 16, 16), torch.zeros(3), 0.1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_thread_kernels_compile_without_a_gpu(arch):
    shapes = {"CLASSES": 7, "IN": 4608, "OUT": 256, "PARTS": 16, "HAS_RELU": 1}
    block = shapes | {"CI": 64, "CO": 128, "H": 12, "W": 12}
    first = shapes | {"CI": 1, "CO": 32, "H": 48, "W": 48}
    tried = [(name, block) for name in {file: name for name, file in KERNELS.items()}.values()]
    tried += [("convolution_forward", first), ("convolution_weight_gradient", first)]
    for name, macros in tried:
        try:
            assert compile_cuda(kernel_source(name), arch, macros)[:4] == b"\x7fELF"
        except NoCompiler:
            pytest.skip("NVRTC is not installed")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_threads_of_a_gpu():
    device, hashes = torch.device("cuda", 0), set()
    model = emotion(48, (32, 64, 128), 256)
    images, labels = torch.randn(8, 1, 48, 48, device=device), torch.arange(8, device=device) % 7
    for count in (256, 1024, 32768, 262144):
        network = CudaNetwork(device, count, 8, model.state_dict())
        loss = float(network.step(images, labels, 0.1))
        hashes.add(network.weights_sha256())
    assert len(hashes) == 1
    exact = model.double()
    expected = functional.cross_entropy(exact(images.cpu().double()), labels.cpu())
    expected.backward()
    assert abs(loss - expected.item()) < 1e-5
    for name, value in exact.named_parameters():
        close(network.weights()[name].cpu(), (value - 0.1 * value.grad).detach())


def test_workers_as_table_picture_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker_runs, "_KEYS", worker_runs._KEYS | {"data.num_train": 64, "data.num_test": 16})
    picture = tmp_path / "threads.png"
    words = ["bench", "threads", "--device", "cpu", "--most", "1", "--epochs", "1"]
    assert run([*words, "--picture", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert "emotion48, fp32, workers" in out and "32768 threads" in out and "drew" in err
    assert picture.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(worker_runs, "_train", lambda kind, count, epochs: fake(kind, count))
    assert run([*words[:-4], "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["details"]["count"] for record in records] == [1, 2, 4, 8, 1, 2]
    assert records[1]["details"]["speedup"] == 2 and records[1]["details"]["efficiency"] == 1


def fake(kind, count, weights=""):
    return Scaled(kind, count, 64, (1.0 / count,), 1.5, 0.25, f"{kind}{weights}")


def test_bits_that_differ_are_told():
    rows = [fake(worker_runs.WORKERS, 1), fake(worker_runs.WORKERS, 2, "other")]
    rows += [fake(worker_runs.THREADS, 1), fake(worker_runs.THREADS, 2, "other")]
    lines = "\n".join(tell_scaled(rows))
    assert "workers: 2 DIFFERENT hashes; there must be one" in lines
    assert "part of a run's identity" in lines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--most", "0"], "--most 0 must be from 1 to"),
        (["--most", "8388608"], "--most 8388608 must be from 1 to 4194304"),
        (["--most", "9"], "--most 9: on a CPU at most 8 workers"),
        (["--steps", "2"], "--steps 2 is for a GPU"),
        (["--epochs", "-1"], "--epochs -1 must be from 1 to 1000"),
        (["--picture", "no/where.png"], "no/where.png"),
    ],
)
def test_bad_input_of_threads_is_one_line(words, says, capsys):
    assert run(["bench", "threads", "--device", "cpu", *words]) == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
