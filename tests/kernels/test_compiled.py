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
    script = Path(__file__).parent / "compiled.py"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), model, precision],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == set(kernels.split())
