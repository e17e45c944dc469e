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
DEEP = "_deep_forward _deep_input_grad _row_moments _row_sums _products"
# in fp32 and tf32 a dense layer is torch's
WIDE = STOCK.replace("_forward _weight_grad ", "")
NORM = f"{SUMS} _box_conv _box_data _box_weight _data_grad _apply _dz _average _spread"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one case has compiled, another finds: both are told of it."""
    return tmp_path_factory.mktemp("compiled")


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
def test_kernels_compile(model: str, precision: str, kernels: str, cache: Path) -> None:
    assert set(run("compile_h200.py", cache, model, precision).split()) == set(kernels.split())


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
