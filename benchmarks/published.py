"""Published tables predicted: strong scaling on A100s, and ResNet-50 of MLPerf from its 8-GPU rows.

python benchmarks/published.py

The first: seconds of training a small CNN on 1, 2, 4 and 8 A100. Each model of communication is fitted on 1,
2 and 4 by least squares, and asked for 8. The second: minutes to train ResNet-50 become images a second; the
preset's rates are scaled by one number so that the 8-GPU row is met, and the other rows are predicted with
their own batch. What the logs hold besides steps (evaluation, the start) is in the minutes, and not in the
prediction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from measure import make_parser, make_record

import lockstep
from lockstep.cli.foresight.counted_profile import count_run
from lockstep.planner.preset import find_cluster
from lockstep.planner.search import judge
from lockstep.spec import Run
from lockstep.spec.cluster import Cluster
from lockstep.spec.plan import Plan
from lockstep.spec.profile import Profile
from lockstep.spec.record import write_records

SECONDS = {1: 698.55, 2: 377.04, 4: 193.34, 8: 112.19}
MODELS = {  # what is added to compute / W, by the number of workers
    "a fixed part": lambda w: [1.0 / w, 1.0],
    "a ring, by bandwidth: (W − 1)/W": lambda w: [1.0 / w, (w - 1) / w],
    "a tree: log₂ W": lambda w: [1.0 / w, np.log2(w)],
    "one after another: W − 1": lambda w: [1.0 / w, w - 1.0],
    "a fixed part and a tree": lambda w: [1.0 / w, 1.0, np.log2(w)],
}
IMAGES = 1_281_167
MLPERF = {  # preset: rows of (GPUs, batch, epochs, minutes); the first is met
    "8xA100, v0.7": [(8, 3264, 41, 39.78), (16, 3264, 41, 23.75), (768, 34560, 59, 1.06)],
    "8xA100, v2.0": [
        (8, 3264, 35, 28.65), (64, 3264, 35, 4.50), (1024, 35840, 60, 0.555), (4216, 67456, 86, 0.319),
    ],
    "8xH100, v3.0": [
        (8, 3200, 35, 13.59), (64, 3200, 35, 2.66), (512, 20480, 50, 0.498), (768, 32256, 56, 0.369),
    ],
    "8xH100, v4.0": [(8, 3200, 35, 13.27), (64, 3200, 35, 2.51), (2528, 40448, 70, 0.228)],
}  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "foresight-published.json")
    options = parser.parse_args()
    records = [fit_scaling(name) for name in MODELS]
    run = lockstep.recipe("imagenet")
    profile = count_run(run, is_imagenet=True)
    for system, rows in MLPERF.items():
        records += predict_rows(system, rows, run, profile)
    for record in records:
        print(f"{record.name}: {record.value:.4g} {record.unit} {record.details}")
    write_records(options.output, records)


def fit_scaling(name: str) -> Any:
    """Fit on 1, 2 and 4, and the error at 8."""
    terms, known = MODELS[name], (1, 2, 4)
    table = np.array([terms(w) for w in known])
    found, *_ = np.linalg.lstsq(table, np.array([SECONDS[w] for w in known]), rcond=None)
    predicted = float(np.dot(terms(8), found))
    error = 100 * (predicted / SECONDS[8] - 1)
    fit = [round(float(100 * (np.dot(terms(w), found) / SECONDS[w] - 1)), 2) for w in known]
    parts = [round(float(part), 2) for part in found]
    return make_record(
        f"8 A100 from 1, 2 and 4: {name}", [error], "% error", seconds=predicted, fit_error=fit, parts=parts
    )


def predict_rows(
    system: str, rows: list[tuple[int, int, int, float]], run: Run, profile: Profile
) -> list[Any]:
    """The first row gives the scale; the error of the others."""
    preset = find_cluster(system.partition(",")[0])
    gpus, batch, epochs, minutes = rows[0]
    seconds = batch / (epochs * IMAGES / (60 * minutes))
    low, high = 0.1, 20.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high)
            if step_s(run, profile, scaled(preset, middle), gpus, batch) > seconds
            else (low, middle)
        )
    cluster, records = scaled(preset, low), []
    for gpus, batch, epochs, minutes in rows[1:]:
        measured = epochs * IMAGES / (60 * minutes)
        predicted = batch / step_s(run, profile, cluster, gpus, batch)
        records.append(
            make_record(
                f"ResNet-50, MLPerf, {system}, {gpus} GPUs, batch {batch}: images a second",
                [100 * (predicted / measured - 1)],
                "% error",
                predicted_img_s=round(predicted),
                measured_img_s=round(measured),
                scale_of_rates=round(low, 3),
            )
        )
    return records


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The same with other rates of computing."""
    worker = cluster.worker
    rates = {name: rate * factor for name, rate in worker.gflop_s.items()}
    return replace(cluster, worker=replace(worker, gflop_s=rates, memory_gb_s=worker.memory_gb_s * factor))


def step_s(run: Run, profile: Profile, cluster: Cluster, gpus: int, batch: int) -> float:
    """Seconds of a step with a lane for every GPU, gradients in bf16."""
    lanes = 1 << (gpus - 1).bit_length()
    images = max(round(batch / gpus), 1)  # a GPU has one lane, whatever their number
    train = replace(run.train, batch=lanes * images, lanes=lanes, wire="bf16")
    return judge(
        replace(run, train=train), profile, cluster, Plan(data=gpus if gpus == lanes else lanes)
    ).cost.total_s


if __name__ == "__main__":
    main()
