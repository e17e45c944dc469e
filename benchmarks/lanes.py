"""What lanes cost: a step at V = 8 beside one at V = 1, interleaved, same batch, one thread.

python benchmarks/lanes.py --rounds 40
"""

from __future__ import annotations

import statistics
import time

import torch
from measure import make_parser, make_record

from lockstep.data.loader import Lanes
from lockstep.kernels.loss import make_loss
from lockstep.kernels.numerics import prepare_device
from lockstep.lower.choose import Sample, lower_for_host
from lockstep.models import build
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer, Run, Train
from lockstep.spec.record import Record, write_records
from lockstep.train.step import Step

BATCH = 256
CASES = {"lenet5": (28, 10), "emotion48": (48, 7)}  # image size, classes


def main() -> None:
    parser = make_parser(__doc__, "lanes-cpu.json")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lanes", type=int, default=8)
    options = parser.parse_args()
    device = prepare_device("cpu", threads=1)
    records: list[Record] = []
    for name in CASES:
        for channels_last in (False, True):
            records.append(compare(name, channels_last, options.lanes, options.rounds, device))
            print(f"{records[-1].name}: {records[-1].value:.3f} {records[-1].spread} {records[-1].details}")
    write_records(options.output, records)


def compare(name: str, channels_last: bool, lanes: int, rounds: int, device: torch.device) -> Record:
    """The ratio of step times, as the median over rounds that hold one step of each."""
    steps = {v: make_step(name, channels_last, v) for v in (1, lanes)}
    times: dict[int, list[float]] = {v: [] for v in steps}
    for round_number in range(rounds + 2):
        for v, (step, batch) in steps.items():
            start = time.perf_counter()
            step(batch)
            if round_number >= 2:  # the first ones make primitives and fill caches
                times[v].append(time.perf_counter() - start)
    ratios = [slow / fast for slow, fast in zip(times[lanes], times[1], strict=True)]
    layout = "channels_last" if channels_last else "contiguous"
    medians = {f"V={v} ms": round(1e3 * statistics.median(values), 2) for v, values in times.items()}
    title = f"{name} {layout}: step at V={lanes} over V=1, B={BATCH}"
    way = type(steps[lanes][0]._lowered).__name__
    return make_record(title, ratios, "x", way=way, **medians)


def make_step(name: str, channels_last: bool, lanes: int) -> tuple[Step, Lanes]:
    size, classes = CASES[name]
    torch.manual_seed(0)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = build(name, in_channels=1, num_classes=classes, image_size=(size, size))
    model = model.to(memory_format=memory_format)
    run = Run(train=Train(batch=BATCH, lanes=lanes), optimizer=Optimizer("momentum", lr=1e-3))
    state = TrainState.begin(model, run.optimizer, 0.0)
    images = torch.randn(BATCH, 1, size, size).contiguous(memory_format=memory_format)
    batch = Lanes(images, torch.randint(0, classes, (BATCH,)), lanes)
    lowered = lower_for_host(model, make_loss(run.train), seed=0, half=None, sample=Sample(lambda: batch))
    return Step(run, state, lowered, steps_per_epoch=100), batch


if __name__ == "__main__":
    main()
