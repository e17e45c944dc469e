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
    ("model", "kernels"), [("emotion48", COMMON), ("residual", f"{COMMON} {NORM}"), ("compiled", STOCK)]
)
def test_kernels_compile(model: str, kernels: str, tmp_path: Path) -> None:
    script = Path(__file__).parent / "compiled.py"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), model, "bf16"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == set(kernels.split())
