"""Files that `lockstep plan --json` and `lockstep scale --json` print, by the code that prints them."""

import contextlib
import io
import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from lockstep import Model, Run
from lockstep.cli.foresight.scale_row import ScaleRow, scale_records
from lockstep.cli.main import run as run_cli

RUN = ["cifar10", "-o", "train.lanes=32", "-o", "train.batch=512", "--json"]
PLANS = {
    "nvlink": ["--cluster", "8xH100"],
    "ethernet": ["--cluster", "cpu-1g"],
    "eight": ["--cluster", "8xH100", "--workers", "8", "--vary", "wire"],
    "few": ["--cluster", "4xK80", "-o", "train.lanes=4"],
}
STEPS_S = {"strong": {1: 0.08, 2: 0.05, 4: 0.04}, "weak": {1: 0.08, 2: 0.09, 4: 0.1, 8: 0.16}}


def write_foresight(folder: Path) -> Path:
    """Predictions for two kinds of links, all plans of eight workers, strong and weak scaling."""
    folder = folder / "foresight"
    folder.mkdir()
    for name, words in PLANS.items():
        with contextlib.redirect_stdout(io.StringIO()) as text:
            assert run_cli(["plan", *RUN, *words]) == 0
        (folder / f"{name}.json").write_text(text.getvalue())
    for kind, steps in STEPS_S.items():
        (folder / f"{kind}.json").write_text(json.dumps(scaled(kind, steps)))
    return folder


def scaled(kind: str, steps: dict[int, float]) -> list[dict]:
    """Records as `lockstep scale` makes them; predictions are a tenth too long."""
    rows = [
        ScaleRow(
            workers,
            64 * workers if kind == "weak" else 64,
            8,
            seconds,
            (0.9 * seconds, 1.2 * seconds),
            20,
            "ab" * 32,
            1.1 * seconds,
        )
        for workers, seconds in steps.items()
    ]
    options = Namespace(weak=kind == "weak", device="cpu")
    return [asdict(record) for record in scale_records(rows, Run(model=Model("lenet5")), options)]
