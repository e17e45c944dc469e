"""curves.png: drawn from metrics.jsonl alone."""

import json

from PIL import Image

from lockstep.report.plot import _smooth, draw_curves


def test_a_run_is_drawn_with_the_workers_it_lost(tmp_path):
    assert draw_curves(tmp_path) is None
    rows = [
        {"kind": "step", "step": n + 1, "loss": 2.0 / (n + 1), "accuracy": n / 200, "lr": 0.1}
        for n in range(200)
    ]
    rows += [{"kind": "epoch", "step": n, "test_loss": 1.0, "test_accuracy": 0.5} for n in (100, 200)]
    for step, workers, change in ((50, 1, "worker 1 died"), (90, 2, "worker 2 joined")):
        rows.append({"kind": "generation", "step": step, "workers": workers, "changes": [change]})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with Image.open(draw_curves(tmp_path)) as picture:
        assert picture.size == (1200, 552) and len(picture.convert("RGB").getcolors(1 << 20)) > 50


def test_a_wait_for_data_has_a_panel_of_its_own(tmp_path):
    def draw(wait_s):
        rows = [
            {"kind": "step", "step": n, "loss": 1.0, "lr": 0.1, "img_s": 80.0, "positions": [0, 8]}
            | {"data_wait_s": wait_s}
            for n in range(1, 9)
        ]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with Image.open(draw_curves(tmp_path)) as picture:
            return picture.size

    assert draw(0.001) == (1200, 552)  # of 0.1 s a step: 1 %
    assert draw(0.05) == (1200, 648)


def test_smoothed_values_lag_behind_nothing():
    assert _smooth([1.0, 2.0, 6.0, 4.0], 1) == [1.5, 3.0, 4.0, 5.0]
    assert _smooth([3.0], 5) == [3.0]
