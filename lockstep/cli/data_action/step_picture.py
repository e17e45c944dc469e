"""`lockstep bench io --picture`: a step's time by kind of layer, and its wait for data from two disks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.images.read_rate import measure_held
from lockstep.data.store import Store
from lockstep.errors import BadInput
from lockstep.kernels.loss import make_loss
from lockstep.kernels.numerics import half_precision, half_type, plain_torch, prepare_device, to_device
from lockstep.lower.fixed_lane import fixed_images, fixed_labels
from lockstep.measure.time_by_kind import time_by_kind
from lockstep.models import build_model
from lockstep.report.step_bars import draw_step_bars
from lockstep.spec import Run


def draw_step(run: Run, store: Store, augment: Augment, path: Path, slow: float, most: int) -> str:
    """Measure and draw; a line that says what was found. `slow` is in megabytes a second."""
    split = store.train
    if not isinstance(split, EncodedSplit):
        raise BadInput(f"--picture {path}: the images of {store.name} are not image files, as it needs them")
    batch, lanes = run.train.batch, run.train.lanes
    kinds, device = _time_layers(run, store)
    kinds = {kind: lanes * seconds for kind, seconds in kinds.items()}
    step, waits = sum(kinds.values()), {}
    for name, limit in (("this disk", None), (f"one held to {slow:g} MB/s", slow)):
        rate = measure_held(split, augment, limit, most)
        waits[name] = max(batch / rate - step, 0.0)  # images are read while the step before computes
    what = f"{run.model.name}, batch {batch} in {lanes} lanes, {store.shape[1]} × {store.shape[2]} pixels"
    title = f"{what}, stock kernels, {device}: the slow disk is this one, with reading held back"
    draw_step_bars(path, title, kinds, waits)
    told = ", ".join(f"{wait:.3f} s with {name}" for name, wait in waits.items())
    return f"{path}: a step computes for {step:.3f} s and waits for data {told}"


def _time_layers(run: Run, store: Store) -> tuple[dict[str, float], str]:
    """Seconds by kind of one lane, forward and backward, with stock kernels, and the kind of device."""
    with plain_torch():
        device = prepare_device("auto", run.train.threads, tf32=run.train.precision == "tf32")
        model = to_device(build_model(run, store.shape, len(store.classes)), device, run).train()
        images = fixed_images(run, store.shape, device)
        labels, loss = fixed_labels(len(images), len(store.classes), device), make_loss(run.train)
        if store.has_values:
            labels = store.train.read(torch.arange(len(images)))[1].to(device)

        def compute() -> None:
            model.zero_grad()
            with half_precision(device, half_type(run.train.precision)):
                found = model(images)
            main: Tensor = found[0] if isinstance(found, tuple) else found
            loss(main.float(), labels).backward()  # type: ignore[no-untyped-call]

        return time_by_kind(compute, device), device.type
