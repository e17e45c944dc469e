"""This engine's step on a GPU, as gpu_step.py times it beside the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from case import Case


def lockstep_step(case: Case, lanes: int, kernels: str = "auto") -> Callable[[], Any]:
    """This engine's step on the GPU as training runs it, epoch after epoch; gives the loss."""
    import torch

    from lockstep.data.store import MemorySplit, Store
    from lockstep.kernels.numerics import prepare_device
    from lockstep.spec import Kernels, Model, Optimizer, Run, Train
    from lockstep.train.setup import Given, set_up

    run = Run(
        model=Model(case.model),
        train=Train(epochs=100_000, batch=case.batch, lanes=lanes, precision=case.precision),
        optimizer=Optimizer("momentum", lr=1e-3),
        kernels=Kernels(set=kernels),
    )
    shape = case.in_channels, case.size, case.size
    split = MemorySplit(
        torch.randint(0, 256, (case.num_images, *shape), dtype=torch.uint8),
        torch.randint(0, case.num_classes, (case.num_images,)),
    )
    half = (0.5,) * case.in_channels
    store = Store("random", tuple(map(str, range(case.num_classes))), shape, split, split, half, half)
    device = prepare_device("cuda", 1, tf32=case.precision == "tf32")
    losses = train_on(set_up(run, device, Given(data=store)))
    return lambda: next(losses)


def train_on(setup: Any) -> Iterator[float]:
    """The losses of all steps, in epochs without evaluation."""
    from lockstep.comm.group import Group
    from lockstep.data.loader import TrainLoader
    from lockstep.runs.train_state import TrainState
    from lockstep.spec import Launch
    from lockstep.train.device.device_epoch import make_device_epochs
    from lockstep.train.step import Step

    run = setup.run
    state = TrainState.begin(setup.model, run.optimizer, 0.0)
    train = run.train
    loader = TrainLoader(
        setup.store.train, setup.augment(), batch=train.batch, lanes=train.lanes, device=setup.device
    )
    lowered = setup.lower(lambda: next(loader.epoch(0)), Group())
    resident = make_device_epochs(setup, state, lowered, Group(), Launch()) if setup.lowering else None
    step = Step(run, state, lowered, len(loader))
    while True:
        if resident:
            results = resident.run(len(loader), lambda n: False, lambda: (False, False))
            yield from (result.loss for result in results)
        else:
            yield from (step(lanes).loss for lanes in loader.epoch(state.epoch))
        state.epoch, state.step_in_epoch = state.epoch + 1, 0
