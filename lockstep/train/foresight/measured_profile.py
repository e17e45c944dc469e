"""Measures a run's Profile on this machine: every layer by itself, and whole steps of one worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.kernels.numerics import prepare_device
from lockstep.lower.fixed_lane import fixed_values
from lockstep.measure.layer_count import list_buffers, list_weights, watch_layers
from lockstep.measure.layer_time import LayerTimer
from lockstep.measure.probe_device import name_device
from lockstep.planner.remembered import as_profiled
from lockstep.spec import Launch, Run
from lockstep.spec.profile import LanesTime, LayerProfile, Profile
from lockstep.train.foresight.load_time import time_loading
from lockstep.train.foresight.step_time import time_steps
from lockstep.train.setup import Setup, set_up

Say = Callable[[str], None]


@dataclass(frozen=True)
class ProfileOptions:
    """How much is measured."""

    images: tuple[int, ...] = ()  # of a lane; empty: as many as the run has
    steps: int = 12
    parts: tuple[tuple[str, int], ...] = ()  # such as ("channel", 2)
    lanes: tuple[int, ...] = ()  # numbers of lanes whose steps are timed; empty: all, half of them, and one
    lane_images: tuple[int, ...] = ()  # images of these lanes; empty: as many as the run has


def measure_profile(run: Run, launch: Launch, options: ProfileOptions, say: Say) -> Profile:
    """The profile of a run whose data is at hand; the device must be prepared by nobody else."""
    run = as_profiled(run)
    train, tf32 = run.train, run.train.precision == "tf32"
    device = prepare_device(launch.device, train.threads, None, tf32)
    own = train.batch // train.lanes
    setup = set_up(run, device)
    sizes = options.images or (own,)
    layers = _time_layers(setup, sizes, options.parts, say)
    say("the loader")
    loading = tuple(time_loading(setup, images) for images in sizes)
    rows, update_s = [], 0.0
    counts = options.lanes or sorted({train.lanes, max(train.lanes // 2, 1), 1}, reverse=True)
    for count, images in ((count, images) for images in options.lane_images or (own,) for count in counts):
        say(f"steps with {count} lane{'s' * (count > 1)} of {images} images")
        small = replace(run, train=replace(train, lanes=count, batch=count * images))
        found = time_steps(setup if small == run else set_up(small, device), launch, options.steps)
        rows.append(LanesTime(count, images, found.median_s))
        update_s = update_s or found.update_s
    return Profile(
        model=setup.model_name,
        shape=setup.store.shape,
        classes=len(setup.store.classes),
        precision=train.precision,
        kernels=setup.lowering.program.kernels if setup.lowering else "stock",
        layers=tuple(layers),
        device=name_device(device),
        lanes=tuple(rows),
        update_s=update_s,
        train_images=len(setup.store.train),
        loading=loading,
        weights=list_weights(setup.model),
        buffers=list_buffers(setup.model),
        how={
            "layers": f"each by itself, medians of {_ROUNDS} rounds, torch {torch.__version__}",
            "loading": "the run's loader through the host, alone, medians of batches",
            "lanes": f"whole steps of one worker, medians of {options.steps}",
        },
    )


_ROUNDS = 5


def _time_layers(
    setup: Setup, sizes: Sequence[int], parts: Sequence[tuple[str, int]], say: Say
) -> list[LayerProfile]:
    """Every layer at every number of images; its parts at the last of them only."""
    timer, found = LayerTimer(setup.half, _ROUNDS), dict[str, LayerProfile]()
    for place, images in enumerate(sizes):
        say(f"layers with {images} image{'s' * (images > 1)}")
        empty = torch.empty(images, *setup.store.shape, device=setup.device)
        lane = empty.to(memory_format=setup.memory_format).copy_(fixed_values("images", empty))
        for call in watch_layers(setup.model, lane):
            known = found.get(call.profile.name)
            timed = timer.time(call, parts if place == len(sizes) - 1 else ())
            if known:
                timed = replace(timed, times=(*known.times, *timed.times))
            found[timed.name] = timed
    return list(found.values())
