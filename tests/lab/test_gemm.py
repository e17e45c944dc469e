"""`lockstep bench gemm`: every rung against float64, CUDA sources compiled without a GPU, and bad input."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lockstep.cli.lab.gemm import tell_ladder
from lockstep.cli.main import run
from lockstep.lab.gemm import gemm_bench
from lockstep.lab.gemm.c_ladder import C_RUNGS, multiply_on_cpu
from lockstep.lab.gemm.cuda_ladder import CUDA_RUNGS, CannotRun, multiply_on_gpu, source_of
from lockstep.lab.gemm.gemm_bench import GemmTime, GemmWay, measure_gemm
from lockstep.lab.timing import time_call
from lockstep.measure.probe_device import TimedRounds
from lockstep.native.nvrtc import CompileFailed, NoCompiler, compile_cuda

SHAPES = [
    (1, 1, 1),
    (8, 16, 24),
    (136, 264, 200),
    (2, 3, 5),
    (7, 129, 33),
    (65, 31, 257),
    (200, 97, 300),
    (192, 24, 256),
    (1, 500, 513),
]


def error_of(found, a, b):
    expected = a.double() @ b.double()
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")
@pytest.mark.parametrize("rung", C_RUNGS, ids=lambda rung: rung.name)
def test_rungs_in_c(rung):
    for rows, columns, depth in SHAPES:
        a, b = torch.randn(rows, depth), torch.randn(depth, columns)
        found = multiply_on_cpu(rung, a, b)
        assert error_of(found, a, b) < 2e-6, (rows, columns, depth)
        if rung.is_threaded:
            assert all(torch.equal(found, multiply_on_cpu(rung, a, b, threads)) for threads in (2, 3, 7, 100))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rung", CUDA_RUNGS, ids=lambda rung: rung.name)
def test_rungs_in_cuda(rung):
    for rows, columns, depth in SHAPES:
        a, b = (
            torch.randn(size, device="cuda", dtype=rung.precision)
            for size in ((rows, depth), (depth, columns))
        )
        try:
            found = multiply_on_gpu(rung, a, b)
        except CannotRun:
            assert rung.by_copy_engine and (columns % 8 or depth % 8)
            continue
        limit = 2e-6 if rung.precision == torch.float32 else 5e-3
        assert error_of(found, a, b) < limit, (rows, columns, depth)


@pytest.mark.parametrize("rung", CUDA_RUNGS, ids=lambda rung: rung.name)
def test_cuda_sources_compile_without_a_gpu(rung):
    for arch in ("sm_90a",) if rung.by_copy_engine else ("sm_80", "sm_90"):
        for rows, columns, depth in ((128, 256, 64), (130, 257, 65)):
            try:
                cubin = compile_cuda(source_of(rung), arch, {"M": rows, "N": columns, "K": depth})
            except NoCompiler:
                pytest.skip("NVRTC is not installed")
            assert cubin[:4] == b"\x7fELF"


def test_an_error_in_a_source_is_told():
    try:
        with pytest.raises(CompileFailed, match="expected a"):
            compile_cuda("__global__ void broken( {", "sm_80", {})
    except NoCompiler:
        pytest.skip("NVRTC is not installed")


def test_the_ladder_as_table_picture_and_records(tmp_path, capsys):
    picture = tmp_path / "ladder.png"
    assert run(["bench", "gemm", "--device", "cpu", "--sizes", "16,33", "--picture", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert "33 × 33, fp32" in out and "naive loops" in out and "% of" in out and "drew" in err
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert run(["bench", "gemm", "--device", "cpu", "--sizes", "16", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert records[-1]["unit"] == "s" and records[-1]["value"] > 0 and records[-1]["hardware"]


def test_a_tiny_product_says_nothing_about_a_large_one(capsys):
    assert run(["bench", "gemm", "--device", "cpu", "--sizes", "1,256"]) == 0
    out, err = capsys.readouterr()
    assert "256 × 256, fp32" in out and "would take" not in err


def test_what_would_take_too_long_is_known_before_the_first_product():
    device, asked = torch.device("cpu"), list[int]()

    def wait(a, b):
        asked.append(len(a))
        time.sleep(0.02)
        return a

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_bench, "ways_to_multiply", lambda *_: [GemmWay("slow", wait)])
        (skipped,) = measure_gemm(device, [(1 << 20, 256, 256)], 1, 0.01)
    assert "would take about" in skipped.why and max(asked) == 256


def test_a_table_without_a_library():
    way = GemmWay("threads, 2", torch.mm, threads=2)
    (head, row) = tell_ladder([GemmTime(way, (8, 8, 8), TimedRounds((1e-3,)), None)])
    assert head == "8 × 8, fp32" and "threads, 2" in row and "%" not in row


def test_no_mode_of_torch_is_timed():
    device, found = torch.device("cpu"), list[object]()

    class Counts(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(func)
            return func(*args, **(kwargs or {}))

    with Counts():
        time_call(lambda: torch.empty(1), device, 0.0)
    assert not found


def test_memory_copies_and_product_apart(capsys):
    assert run(["bench", "gemm", "--device", "cpu", "--parts", "--sizes", "32"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("allocate", "copy there", "multiply", "copy back", "in all"))
    assert run(["bench", "gemm", "--device", "cpu", "--parts", "--sizes", "32", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 10


def test_the_triton_kernel_against_float64():
    """By Triton's interpreter, in a process of its own, since it must be chosen before the import."""
    code = (
        "import torch\n"
        "from lockstep.lab.gemm import triton_gemm as t; t._TILE |= {'BM': 16, 'BN': 32, 'BK': 16}\n"
        "for m, n, k in ((1, 1, 1), (33, 70, 29), (16, 32, 16)):\n"
        "    a, b = torch.randn(m, k), torch.randn(k, n)\n"
        "    assert (t.multiply_by_triton(a, b).double() - a.double() @ b.double()).abs().max() < 1e-4"
    )
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)


def test_without_a_compiler_the_others_run(monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    from lockstep.native.c_library import compile_c

    compile_c.cache_clear()
    assert run(["bench", "gemm", "--device", "cpu", "--sizes", "16"]) == 0
    out, err = capsys.readouterr()
    assert "left out: naive loops: there is no C compiler: install gcc" in err and "16 × 16" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sizes", "0"], "--sizes 0 must be whole numbers from 1"),
        (["--sizes", "many"], "--sizes many must be"),
        (["--skinny", "--sizes", "8"], "--skinny has sizes of its own"),
        (["--parts", "--skinny"], "--parts has a table only"),
        (["--sizes", ""], "--sizes  must be whole numbers"),
        (["--sizes", "16385"], "--sizes 16385 must be whole numbers from 1 to 16384"),
        (["--threads", "-1"], "--threads -1 must be from 1"),
        (["--threads", "0"], "--threads 0 must be from 1"),
        (["--threads", "1025"], "--threads 1025 must be from 1 to 1024"),
        (["--parts", "--threads", "2"], "--threads 2 is for the ladder"),
        (["--picture", "no/where.png"], "no/where.png"),
    ],
)
def test_bad_input_is_one_line(words, says, capsys):
    assert run(["bench", "gemm", "--device", "cpu", *words]) == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
