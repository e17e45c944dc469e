"""`lockstep bench conv`: every algorithm against float64, refusals, formulas, pictures and bad input."""

import json
import random
import shutil
from contextlib import suppress

import pytest
import torch
from torch import nn

from lockstep.cli.main import run
from lockstep.lab.conv.conv_algorithm import CONV_ALGORITHMS, run_conv
from lockstep.lab.conv.conv_bench import library_conv, make_operands, measure_errors
from lockstep.lab.conv.conv_input import ConvRefused
from lockstep.lab.conv.conv_layers import network_layers
from lockstep.lab.conv.conv_map import MapCell
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.lab.conv.conv_work import count_operations, depth_of, work_of
from lockstep.lab.conv.toeplitz import toeplitz_taps
from lockstep.measure.probe_device import TimedRounds
from lockstep.models.registry import build
from lockstep.native.c_library import compile_c
from lockstep.report.conv_map_picture import DrawnCell, draw_conv_map

CPU = torch.device("cpu")
BY_NAME = {algorithm.name: algorithm for algorithm in CONV_ALGORITHMS}
EVERY = pytest.mark.parametrize("algorithm", CONV_ALGORITHMS, ids=BY_NAME)
SHAPE = ConvShape(2, 6, 4, 9, 7, 3, padding=1)


def random_shapes(count):
    """Odd ones too: one pixel, one channel, groups, filters that only padding makes fit."""
    draw, found = random.Random(23), [ConvShape(1, 1, 1, 1, 1, 1), ConvShape(1, 2, 3, 3, 3, 3)]
    while len(found) < count:
        groups = draw.choice((1, 1, 2, 3))
        shape = ConvShape(
            draw.randint(1, 3), groups * draw.randint(1, 9), groups * draw.randint(1, 9),
            draw.randint(1, 19), draw.randint(1, 19), draw.choice((1, 2, 3, 3, 3, 3, 5)),
            draw.choice((1, 1, 2, 3)), draw.choice((0, 1, 2, 3)), draw.choice((1, 1, 2)), groups,
        )  # fmt: skip
        if min(shape.result_size) > 0:
            found.append(shape)
    return found


def worst_error(algorithm, shape, which, precision, device=CPU):
    first, second = make_operands(shape, which, precision, device)
    exact = library_conv(shape, which, first.double(), second.double())
    found = run_conv(algorithm, shape, which, first, second)
    assert found.shape == exact.shape and found.dtype == precision and found.is_contiguous()
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1.0))


@EVERY
@pytest.mark.parametrize("which", ConvPass)
def test_every_pass_against_float64(algorithm, which):
    if algorithm.is_c and not shutil.which("cc"):
        pytest.skip("no compiler")
    tried = 0
    for shape in random_shapes(60):
        try:
            assert worst_error(algorithm, shape, which, torch.float32) < 2e-5, shape
            tried += 1
        except ConvRefused:
            assert algorithm.tile and (shape.kernel, shape.stride, shape.dilation) != (3, 1, 1), shape
    assert tried >= 5


@EVERY
@pytest.mark.parametrize("which", ConvPass)
def test_other_precisions(algorithm, which):
    if algorithm.is_c:
        with pytest.raises(ConvRefused, match=f"{algorithm.name}: precision bfloat16 must be fp32 on a CPU"):
            worst_error(algorithm, SHAPE, which, torch.bfloat16)
        return
    assert worst_error(algorithm, SHAPE, which, torch.float64) < 1e-13
    assert worst_error(algorithm, SHAPE, which, torch.bfloat16) < 0.2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@EVERY
@pytest.mark.parametrize("which", ConvPass)
def test_every_pass_on_a_gpu(algorithm, which):
    for shape in random_shapes(12):
        for precision, most in ((torch.float32, 2e-5), (torch.bfloat16, 0.3)):
            with suppress(ConvRefused):
                error = worst_error(algorithm, shape, which, precision, torch.device("cuda", 0))
                assert error < most, (shape, precision)


def test_large_tiles_lose_accuracy_in_bf16():
    found = measure_errors(CPU, ConvShape(1, 16, 16, 12, 12, 3, padding=1), ConvPass.FORWARD)
    errors = {name: each["bf16"] for name, each in found.items()}
    assert errors["direct"] is None and errors["library of torch"] < 0.01
    assert errors["FFT"] < errors["Winograd F(2×2)"] < errors["Winograd F(4×4)"]


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("Winograd F(2×2)", ConvShape(1, 1, 1, 8, 8, 5), "F(2×2): kernel 5: it admits 3×3 filters with"),
        ("Winograd F(4×4)", ConvShape(1, 1, 1, 8, 8, 3, stride=2), "Winograd F(4×4): stride 2: it admits"),
        ("Winograd F(4×4)", ConvShape(1, 1, 1, 8, 8, 3, dilation=2), "F(4×4): dilation 2: it admits"),
        ("FFT", ConvShape(1, 2048, 2048, 56, 56, 3), "with spectra of 112.6 GiB: on a CPU the most is 4 GiB"),
        ("im2col + GEMM", ConvShape(8, 512, 1, 224, 224, 3, padding=1), "im2col + GEMM: columns of 6.9 GiB"),
    ],
)
def test_refusals(name, shape, says):
    first, second = torch.zeros(1), torch.zeros(1)
    with pytest.raises(ConvRefused) as refusal:
        run_conv(BY_NAME[name], shape, ConvPass.FORWARD, first, second)
    assert says in str(refusal.value)


def test_work_and_depth():
    shape = ConvShape(2, 16, 32, 8, 8, 3, padding=1)
    direct, fft, tiles = BY_NAME["direct"], BY_NAME["FFT"], BY_NAME["Winograd F(2×2)"]
    assert work_of(direct, shape) == work_of(BY_NAME["im2col + GEMM"], shape) == 2 * 32 * 64 * 16 * 9
    assert depth_of(direct, shape, ConvPass.FORWARD) == 4 + 2 + 2
    assert depth_of(direct, shape, ConvPass.DATA) == 5 + 2 + 2
    assert depth_of(direct, shape, ConvPass.WEIGHT) == 1 + 3 + 3
    planes, size = 16 * 32 + 2 * 16 + 2 * 32, 100
    expected = 2.5 * size * 6.643856 * planes + size * 2 * 16 * 32
    assert work_of(fft, shape) == pytest.approx(expected, rel=1e-6)
    assert depth_of(fft, shape, ConvPass.FORWARD) == 2 * 7 + 4
    filters, images, sums = 512 * 4 * (9 + 12), 32 * 16 * 128, 32 * 32 * 4 * (8 + 4)
    assert work_of(tiles, shape) == filters + images + sums + 16 * 32 * 512
    assert depth_of(tiles, shape, ConvPass.FORWARD) == 4 + 8 + 4
    assert depth_of(tiles, shape, ConvPass.WEIGHT) == 4 + 8 + 1 + 4


def test_operations_counted():
    shape = ConvShape(2, 64, 64, 32, 32, 3, padding=1)
    counted = {
        name: [count_operations(algorithm, shape, which) / shape.operations for which in ConvPass]
        for name, algorithm in BY_NAME.items()
    }
    assert counted["direct"] == counted["implicit GEMM"] == [1, 1, 1]
    assert all(1 <= share < 1.02 for share in counted["im2col + GEMM"])
    assert all(1 / 2.25 < share < 1.4 / 2.25 for share in counted["Winograd F(2×2)"])
    assert all(1 / 4 < share < 1.6 / 4 for share in counted["Winograd F(4×4)"])
    strided = ConvShape(1, 2, 4, 8, 8, 2, stride=2)  # every pixel meets one value of each filter
    assert count_operations(BY_NAME["implicit GEMM"], strided, ConvPass.DATA) == 2 * 64 * 2 * 4


def test_layers_are_those_of_the_models():
    names = {"LeNet": ("lenet5", 1, 28), "AlexNet": ("alexnet", 3, 224), "GoogLeNet": ("googlenet", 3, 224),
             "ResNet": ("resnet50", 3, 224)}  # fmt: skip
    assert names.keys() == network_layers().keys()
    for network, (name, channels, side) in names.items():
        with torch.device("meta"):
            model = build(name, in_channels=channels, num_classes=10, image_size=(side, side)).eval()
        found = set()

        def keep(layer, given, _, found=found):
            one = layer.kernel_size[0], layer.stride[0], layer.padding[0], layer.dilation[0], layer.groups
            found.add(ConvShape(1, layer.in_channels, layer.out_channels, *given[0].shape[2:], *one))

        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(keep)
        model(torch.empty(1, channels, side, side, device="meta"))
        assert found == set(network_layers()[network]), network


@pytest.mark.parametrize("shape", [ConvShape(1, 1, 1, 4, 5, 3), ConvShape(1, 1, 1, 6, 5, 2, 2, 1, 2)])
def test_toeplitz_matrix_is_the_convolution(shape):
    image, weight = torch.randn(shape.image_size), torch.randn(shape.weight_size)
    values = torch.cat([weight.flatten(), torch.zeros(1)])  # the last stands for what -1 means
    found = values[toeplitz_taps(shape)] @ image.flatten()
    expected = library_conv(shape, ConvPass.FORWARD, image, weight).flatten()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def bench(*words):
    return run(["bench", "conv", "--device", "cpu", *words])


def test_table_and_records(capsys):
    assert bench("--shape", "1,4,8,8,6,3", "--padding", "1") == 0
    out, err = capsys.readouterr()
    assert "given: 1 × 4 × 8 × 8 to 6, 3 × 3, padding 1, forward, fp32" in out and "given: forward" in err
    assert all(name in out for name in BY_NAME) and "weight gradient, bf16" in out and "of library" in out
    assert bench("--shape", "1,4,8,8,6,5", "--stride", "2", "--groups", "2", "--pass", "data", "--json") == 0
    out, err = capsys.readouterr()
    records = json.loads(out)
    assert [record["name"].split(",")[1] for record in records] == [" data gradient"] * 5
    assert records[0]["details"]["error"] < 1e-5 and records[0]["details"]["depth"] == 8
    assert "left out: Winograd F(2×2) (given): kernel 5: it admits 3×3" in err


def test_without_a_compiler_the_others_run(monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    compile_c.cache_clear()
    assert bench("--shape", "1,2,5,5,2,3", "--pass", "forward") == 0
    out, err = capsys.readouterr()
    assert "left out: direct (given): there is no C compiler: install gcc" in err
    assert "im2col" in out and "Winograd F(4×4)" in out


def test_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lockstep.lab.conv.conv_map.MAP_SIZES", (7, 14))
    monkeypatch.setattr("lockstep.lab.conv.conv_map.MAP_CHANNELS", (4, 16))
    drawn, matrix = tmp_path / "map.png", tmp_path / "matrix.png"
    assert bench("--map", str(drawn), "--toeplitz", str(matrix)) == 0
    out, err = capsys.readouterr()
    assert "11 × 11 filters, 14 × 14 pixels: 4 channels" in out and "drew" in err
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (drawn, matrix))


def test_a_map_has_room_for_what_was_not_measured(tmp_path):
    cells = [DrawnCell(3, 4, 7, "b", 1.5), DrawnCell(5, 16, 14, "a", None)]
    points = {"net": [(3, 8.0, 14), (3, 5000.0, 1), (7, 1.0, 1)]}
    draw_conv_map(tmp_path / "map.png", "a test", ["a", "b"], ((4, 16), (7, 14)), cells, points)
    assert (tmp_path / "map.png").stat().st_size > 1000
    times = {"a": TimedRounds((2.0, 3.0)), "b": TimedRounds((1.0,))}
    assert MapCell(SHAPE, times).winner == "b" and MapCell(SHAPE, times).gain_over("a") == 2.5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shape", "1,2,3"], "--shape 1,2,3 must be six whole numbers from 1"),
        (["--shape", "1,2,8,8,2,x"], "--shape 1,2,8,8,2,x must be"),
        (["--shape", "1,2,8,8,2,0"], "--shape 1,2,8,8,2,0 must be"),
        (["--shape", "1,2,4,4,2,7"], "larger than the image with padding 0"),
        (["--shape", "1,2,8,8,2,3", "--groups", "3"], "--groups 3 must divide 2 channels"),
        (["--shape", "1,2,8,8,2,3", "--stride", "0"], "--stride 0 must be from 1 to"),
        (["--shape", "1,2,8,8,2,3", "--padding", "-1"], "--padding -1 must be from 0 to"),
        (
            ["--shape", "1,2,8,8,2,3", "--dilation", "999999999999"],
            "--dilation 999999999999 must be from 1 to",
        ),
        (["--shape", ""], "--shape  must be six whole numbers"),
        (["--toeplitz", "x.png", "--json"], "--toeplitz x.png only draws: leave out --json"),
        (["--shape", "9999,9999,9999,9999,1,3"], "give less"),
        (["--stride", "2"], "--stride 2 belongs to a shape: give --shape too"),
        (["--map", "no/where.png"], "no/where.png"),
        (["--map", "a.png", "--shape", "1,2,8,8,2,3"], "--map has shapes of its own"),
        (["--map", "a.png", "--toeplitz", "a.png"], "two pictures need two files"),
        (["--toeplitz", "a.png", "--shape", "1,1,20,20,1,3"], "give a smaller image"),
        (["--toeplitz", "a.pdf"], "pictures are PNG files"),
    ],
)
def test_bad_input_is_one_line(words, says, capsys):
    assert bench(*words) == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
