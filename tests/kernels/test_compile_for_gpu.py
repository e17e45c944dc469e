"""Every kernel of a step compiles for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = (
    "_forward _cross_entropy _lane_means _weight_grad _input_grad _tree_sum _update _advance _gather _order"
)
SUMS = "_moments _join_some _finish _sums _totals"
STOCK = f"_forward _weight_grad _cross_entropy _lane_means _tree_sum _update _advance _gather _order {SUMS}"
NORM = f"{SUMS} _box_conv _box_data _box_weight _data_grad _apply _dz _average _spread"


@pytest.mark.parametrize(
    ("model", "precision", "kernels"),
    [
        ("emotion48", "bf16", COMMON),
        ("residual", "bf16", f"{COMMON} {NORM}"),
        ("compiled", "bf16", STOCK),
        ("narrow", "fp32", "_data_grad"),
    ],
)
def test_kernels_compile(model: str, precision: str, kernels: str, tmp_path: Path) -> None:
    assert set(run("compile_h200.py", tmp_path, model, precision).split()) == set(kernels.split())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_kernels_compile_beside_each_other(tmp_path: Path) -> None:
    assert run("compile_beside.py", tmp_path) == "[1, 2, 3]\n"


def run(script: str, cache: Path, *arguments: str) -> str:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
