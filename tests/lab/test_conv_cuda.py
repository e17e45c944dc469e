"""Convolutions in CUDA C++: compiled without a GPU, run on a CPU, and on a GPU if there is one."""

import random
from functools import partial

import pytest
import torch
from lab.cuda_on_cpu import needs_gxx, run_cuda_on_cpu

from lockstep.errors import LockstepError
from lockstep.lab.conv import conv_on_gpu, launch_on_gpu
from lockstep.lab.conv.conv_on_gpu import (
    direct_on_gpu,
    im2col_on_gpu,
    implicit_gemm_on_gpu,
    winograd_on_gpu,
)
from lockstep.lab.conv.conv_shape import ConvPass, ConvShape
from lockstep.lab.conv.launch_on_gpu import conv_cuda_source, macros_of
from lockstep.native.nvrtc import NoCompiler, compile_cuda

ANY_SHAPE = {"direct": direct_on_gpu, "im2col": im2col_on_gpu, "implicit GEMM": implicit_gemm_on_gpu}
WINOGRAD = {f"F({tile}×{tile})": partial(winograd_on_gpu, tile) for tile in (2, 4)}
TILE = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 8}
SOURCES = [
    ("direct.cu", {}),
    ("im2col.cu", {}),
    ("implicit_gemm.cu", TILE | {"IS_DATA": 0}),
    ("implicit_gemm.cu", TILE | {"IS_DATA": 1}),
    ("implicit_gemm_weight.cu", TILE | {"PARTS": 3}),
    ("winograd.cu", {"TILE": 2, "PARTS": 2, "PART_TILES": 24, "IS_ROTATED": 0}),
    ("winograd.cu", {"TILE": 4, "PARTS": 1, "PART_TILES": 24, "IS_ROTATED": 1}),
]
LAYER = ConvShape(2, 16, 24, 14, 14, 3, padding=1)
ODD = ConvShape(3, 10, 6, 9, 7, 3, stride=2, padding=2, dilation=2, groups=2)
STRIDED = ConvShape(2, 16, 72, 9, 6, 2, stride=2, padding=1)
UNIT = ConvShape(3, 5, 4, 7, 9, 3, padding=1)
GROUPED = ConvShape(2, 6, 4, 7, 10, 3, groups=2)


def operands(shape, which, dtype=torch.float32, device="cpu"):
    maker = torch.Generator().manual_seed(shape.height)
    images, weight, results = (
        torch.randn(size, generator=maker).to(device, dtype)
        for size in (shape.image_size, shape.weight_size, shape.result_size)
    )
    return {
        ConvPass.FORWARD: (images, weight),
        ConvPass.DATA: (results, weight),
        ConvPass.WEIGHT: (images, results),
    }[which]


def in_float64(shape, which, first, second):
    first, second = first.double().cpu(), second.double().cpu()
    images = (torch.zeros(shape.image_size) if which is ConvPass.DATA else first).double().requires_grad_()
    weight = (
        (torch.zeros(shape.weight_size) if which is ConvPass.WEIGHT else second).double().requires_grad_()
    )
    result = torch.nn.functional.conv2d(
        images, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups
    )
    if which is ConvPass.FORWARD:
        return result.detach()
    result.backward(first if which is ConvPass.DATA else second)
    return images.grad if which is ConvPass.DATA else weight.grad


def error_of(convolve, shape, which, dtype=torch.float32, device="cpu"):
    first, second = operands(shape, which, dtype, device)
    expected = in_float64(shape, which, first, second)
    found = convolve(shape, which, first, second)
    assert found.dtype == dtype and found.shape == expected.shape and found.is_contiguous()
    return float((found.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


@pytest.mark.parametrize(("file", "more"), SOURCES, ids=lambda value: value if isinstance(value, str) else "")
def test_sources_compile_without_a_gpu(file, more):
    for arch, dtype in (("sm_80", torch.bfloat16), ("sm_90", torch.float32)):
        try:
            cubin = compile_cuda(conv_cuda_source(file), arch, macros_of(LAYER, dtype) | more)
        except NoCompiler:
            pytest.skip("NVRTC is not installed")
        assert cubin[:4] == b"\x7fELF"


@pytest.fixture
def on_cpu(monkeypatch):
    """Kernels run on the CPU, and sums of these small shapes are cut into parts."""

    def kernel(file, name, _device, defines):
        source = conv_cuda_source(file)
        return lambda grid, block, given: run_cuda_on_cpu(source, name, grid, block, given, dict(defines))

    monkeypatch.setattr(launch_on_gpu, "_kernel", kernel)
    monkeypatch.setattr(conv_on_gpu, "multiply_batch", lambda a, b, dtype: (a.float() @ b.float()).to(dtype))
    monkeypatch.setattr(conv_on_gpu, "_LEAST_TILES", 16)


@needs_gxx
@pytest.mark.parametrize("which", ConvPass)
@pytest.mark.parametrize(
    ("algorithm", "shape", "dtype"),
    [
        ("direct", ODD, torch.float32),
        ("im2col", ODD, torch.bfloat16),
        ("implicit GEMM", ODD, torch.float32),
        ("implicit GEMM", STRIDED, torch.bfloat16),
        ("F(2×2)", UNIT, torch.float32),
        ("F(4×4)", GROUPED, torch.float32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kernels_on_a_cpu(algorithm, shape, dtype, which, on_cpu, monkeypatch):
    monkeypatch.setattr(conv_on_gpu, "_ENOUGH_BLOCKS", 4 if shape is STRIDED else 128)  # few: large tiles
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    assert error_of((ANY_SHAPE | WINOGRAD)[algorithm], shape, which, dtype) < limit


@pytest.mark.parametrize(
    ("tile", "change", "says"),
    [
        (2, {"stride": 2}, "Winograd F(2×2, 3×3): stride 2: it is for 1 only"),
        (4, {"kernel": 5}, "Winograd F(4×4, 3×3): kernel 5: it is for 3 only"),
        (4, {"dilation": 2}, "Winograd F(4×4, 3×3): dilation 2: it is for 1 only"),
        (3, {}, "Winograd F(3×3, 3×3): tile 3: it is for 2 and 4 only"),
    ],
)
def test_what_winograd_refuses(tile, change, says):
    shape = ConvShape(
        **{"batch": 2, "in_channels": 3, "out_channels": 4, "height": 8, "width": 8} | {"kernel": 3} | change
    )
    with pytest.raises(LockstepError) as error:
        winograd_on_gpu(tile, shape, ConvPass.FORWARD, *operands(shape, ConvPass.FORWARD))
    assert str(error.value) == says


def test_what_all_refuse():
    first, second = operands(UNIT, ConvPass.FORWARD)
    for given, says in (
        ((ConvPass.FORWARD, first, second), "direct.cu: tensors on cpu: its kernels run on a GPU"),
        ((ConvPass.FORWARD, first.double(), second), "direct: torch.float64 by torch.float32: it takes two"),
        (
            (ConvPass.WEIGHT, first, second),
            r"direct: a tensor of \(4, 5, 3, 3\): the weight gradient takes \(3, 4,",
        ),
    ):
        with pytest.raises(LockstepError, match=says):
            direct_on_gpu(UNIT, *given)


def random_shape(maker, is_unit):
    groups = maker.choice((1, 1, 2, 3))
    kernel, stride, dilation = (
        (3, 1, 1) if is_unit else (maker.randint(1, 5), maker.randint(1, 3), maker.randint(1, 2))
    )
    least = dilation * (kernel - 1) + 1
    return ConvShape(
        batch=maker.randint(1, 5),
        in_channels=groups * maker.choice((1, 3, 8, 16, 67)),
        out_channels=groups * maker.choice((1, 5, 8, 64, 130)),
        height=least + maker.randint(0, 30),
        width=least + maker.randint(0, 30),
        kernel=kernel,
        stride=stride,
        padding=maker.randint(0, 2),
        dilation=dilation,
        groups=groups,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("algorithm", [*ANY_SHAPE, *WINOGRAD])
def test_algorithms_on_a_gpu(algorithm):
    maker = random.Random(algorithm)
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 0.2 if algorithm == "F(4×4)" else 2e-2)):
        for _ in range(8):
            shape = random_shape(maker, algorithm in WINOGRAD)
            for which in ConvPass:
                convolve = (ANY_SHAPE | WINOGRAD)[algorithm]
                assert error_of(convolve, shape, which, dtype, "cuda") < limit, (shape, which)
