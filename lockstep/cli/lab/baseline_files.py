"""What the contestants of `lockstep bench baselines` are given: weights, images and order as files."""

from __future__ import annotations

from pathlib import Path

from lockstep.lab.baselines.baseline_task import BaselineTask


def write_files(task: BaselineTask) -> None:
    """Weights, images and order as Lockstep has them in the run of this task."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from lockstep.data import open_data
    from lockstep.data.augment import make_augment
    from lockstep.data.order import sample_ids
    from lockstep.lab.baselines.lockstep_contestant import overrides_of
    from lockstep.models import build_model
    from lockstep.recipes import recipe
    from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table

    run = from_table(merge(to_table(recipe("emotion")), parse_overrides(overrides_of(task))))
    store, folder = open_data(run), Path(task.folder)
    model = build_model(run, store.shape, len(store.classes))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        folder / "weights.safetensors",
    )
    augment = make_augment(run, store.shape, store.mean, store.std)
    for name, split, labels in (("images", store.train, "labels"), ("tests", store.test, "test_labels")):
        pixels, classes = split.read(torch.arange(len(split)))
        np.save(folder / f"{name}.npy", augment.normalize(pixels).numpy())
        np.save(folder / f"{labels}.npy", classes.numpy())
    np.save(folder / "test_bytes.npy", pixels.numpy())
    steps = task.images // task.batch
    order = [
        sample_ids(run.seed, epoch, torch.arange(steps * task.batch), task.images)
        for epoch in range(task.epochs)
    ]
    np.save(folder / "order.npy", torch.stack(order).view(task.epochs, steps, task.batch).numpy())
