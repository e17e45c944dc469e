"""Every kernel of a step compiles for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMON = (
    "_forward _cross_entropy _lane_means _weight_grad _input_grad _tree_sum _update _advance _gather _order"
)
SUMS = "_moments _join_some _finish _sums _totals"
STOCK = f"_forward _weight_grad _cross_entropy _lane_means _tree_sum _update _advance _gather _order {SUMS}"
DEEP = "_deep_forward _deep_input_grad _row_moments _row_sums _products"
# in fp32 and tf32 a dense layer is torch's
WIDE = STOCK.replace("_forward _weight_grad ", "")
NORM = f"{SUMS} _box_conv _box_data _box_weight _data_grad _apply _dz _average _spread"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    """What one case has compiled, another finds: both are told of it."""
    with Compiler(tmp_path_factory.mktemp("compiled")) as found:
        yield found


class Compiler:
    """The process whose children compile."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "compile_h200.py")],
                env=environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process as process:
            process.kill()

    def names(self, model: str, precision: str) -> set[str]:
        """The kernels of a case."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{model} {precision}\n")
        self._process.stdin.flush()
        words: list[str] = []
        for line in self._process.stdout:
            words += line.split()
            if line.startswith("."):
                break
        assert words[-2:] == [".", "0"], self._errors.read_text()[-2000:]
        return set(words[:-2])


@pytest.mark.parametrize(
    ("model", "precision", "kernels"),
    [
        ("emotion48", "bf16", f"{COMMON} _move"),  # with every optimizer
        ("residual", "bf16", f"{COMMON} {NORM}"),
        ("compiled", "bf16", STOCK),
        ("mobile", "bf16", f"{STOCK.replace('_join_some ', '')} {DEEP} _deep_matrix_grad"),
        ("compiled", "fp16", f"{STOCK} _judge _rescale"),
        ("compiled", "tf32", WIDE),
        ("mobile", "fp32", f"{WIDE.replace('_join_some ', '')} {DEEP} _deep_weight_grad"),
        ("narrow", "fp32", "_data_grad _gather"),
    ],
)
def test_kernels_compile(model: str, precision: str, kernels: str, compiler: Compiler) -> None:
    assert compiler.names(model, precision) == set(kernels.split())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_kernels_compile_beside_each_other(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_beside.py")],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "[1, 2, 3]\n"


def environment(cache: Path) -> dict[str, str]:
    """In which Triton compiles, and keeps what it has compiled."""
    return {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}


FIRST = """
import os, time
from lockstep.kernels.cuda_graph import one_compiles_first
def child():
    with one_compiles_first():
        came = os.open("log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(came, b"in ")
        time.sleep(0.5)
        if not os.path.exists("died"):
            open("died", "w").close()
            os._exit(0)  # the first dies inside
        os.write(came, b"out ")
for _ in range(4):
    if not os.fork():
        child()
        os._exit(0)
for _ in range(4):
    os.wait()
print(open("log").read())
"""


def test_one_worker_of_a_host_compiles_first_and_the_others_together(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "in in in in out out out \n"
