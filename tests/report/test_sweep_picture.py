"""Pictures of sweeps with any number of keys and runs are drawn without a warning."""

import pytest
from PIL import Image

from lockstep.report.sweep_picture import SweptCurve, draw_sweep


def curve(values, num_epochs=3, seeds=1):
    label = ",".join(map(str, values)) or "the Run"
    run = tuple((10 * i, 2.5 * i, 50.0 + 5 * i) for i in range(1, num_epochs + 1))
    return SweptCurve(label, values, (run,) * seeds)


CASES = {
    "seeds": ([], [curve((), seeds=3)]),
    "one run": (["lr"], [curve((0.1,), num_epochs=1)]),
    "a key": (["lr"], [curve((10.0**-i,)) for i in range(12)]),
    "words": (["name"], [curve((name * 20,)) for name in "abcdef"]),
    "two keys": (["batch", "lr"], [curve((b, lr), seeds=2) for b in (256, 512, 1024) for lr in (0.1, 0.2)]),
    "draws": (["lr", "decay"], [curve((0.01 * i, 0.001 / i)) for i in range(1, 15)]),
    "three keys": (["batch", "lr", "name"], [curve((b, 0.1, name)) for b in (1, 2) for name in "ab"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_picture(case, tmp_path):
    keys, curves = CASES[case]
    draw_sweep(tmp_path / "sweep.png", "a sweep", keys, "validation", curves)
    with Image.open(tmp_path / "sweep.png") as image:
        assert image.width == 1320 and image.getextrema()[0][0] < 200
