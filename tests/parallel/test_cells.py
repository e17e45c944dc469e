"""Layers in cells of the grid: where kernels do not keep their bits by channels or rows, one worker, too."""

import sys
from pathlib import Path

import forked
import pytest
from plan_runs import hashes
from small import summary

SCRIPT = Path(__file__).parent / "all_in_cells.py"
SLICED = {
    f"{layer}.{part} by slices"
    for layer in ("first", "left", "right", "up", "grouped", "head")
    for part in ("forward", "input", "weight")
    if (layer, part) != ("head", "input")  # a sum over slices anyhow
}


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bands", "plans"), [(1, ("channel=2", "channel=3")), (2, ("channel=4", "channel=2,spatial=2"))]
)
def test_layers_in_cells_are_cut_and_have_the_bits_of_one_worker(bands, plans, tmp_path):
    found = {}
    for plan in ("data=1", *plans):
        command = [sys.executable, str(SCRIPT), plan, str(bands), str(tmp_path / plan)]
        done = forked.call(command, launches=True)
        assert done.returncode == 0, done.stderr
        found[plan] = hashes(tmp_path / plan / "run")
    assert all(own == found["data=1"] for own in found.values())
    for plan in plans:
        layers = summary(tmp_path / plan / "run")["layers"]
        assert set(layers["cells"]) >= SLICED
        assert ("right.forward by bands" in layers["cells"]) == (bands > 1)
        assert layers["share"] == 1.0 or "spatial" in plan, layers["rows"]
