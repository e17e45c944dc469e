"""A dry run: a run is built as for training, does its first steps in memory, and tells what they took."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

from lockstep.comm.tree import worker_lanes
from lockstep.errors import Paused
from lockstep.measure.peak_memory import peak_bytes, used_bytes
from lockstep.measure.probe_device import name_device
from lockstep.runs.event import Listener, Notice, Tried
from lockstep.runs.state_parts import StateParts
from lockstep.runs.train_state import TrainState
from lockstep.spec import Launch
from lockstep.spec.identity import digest
from lockstep.train.dealt import Dealt
from lockstep.train.engine import Engine
from lockstep.train.foresight.own_prediction import predict_memory
from lockstep.train.result import StepResult

_ROUNDS = 2  # the first one allocates, compiles and looks up; the second is what the others take


def try_run(dealt: Dealt, state: TrainState, launch: Launch, tell: Listener) -> Paused:
    """Do the first steps and tell of them; gives what ends the run. A collective."""
    setup, world, plan = dealt.setup, dealt.mesh.world, dealt.plan
    kept, before = state.pieces(), used_bytes(setup.device)
    run, about = setup.run, setup.about()
    if world.rank == 0:
        for warning, texts in ((False, about.notices), (True, about.warnings)):
            for text in texts:
                tell(Notice(text, warning))
    begin = time.perf_counter()
    with (
        dealt.explain_memory(),
        closing(Engine(dealt.at(0), state, launch)) as engine,
    ):
        evaluate = dealt.evaluator(launch.graph)  # it needs memory, too
        built_s, took = time.perf_counter() - begin, _do_steps(engine)
        predicted, source = engine.foretell()
        del evaluate
    mine = {
        **_where(dealt),
        "built_s": built_s,
        "first_s": took[0][0],
        "step_s": took[-1][0] if len(took) > 1 else None,
        "data_s": took[-1][1].waited_s / took[-1][1].steps,
        "exchange_s": took[-1][1].exchange_s / took[-1][1].steps,
        "peak_bytes": peak_bytes(setup.device),
        # weights and memory of the optimizer were there before the first step, as was much else
        "taken_bytes": peak_bytes(setup.device) - before + sum(piece.tensor.nbytes for piece in kept),
    }
    every = [json.loads(text) for text in world.all_gather_bytes(json.dumps(mine).encode())]
    state_bytes = (state.parts or StateParts()).num_bytes(kept)
    if world.rank == 0:
        tell(
            Tried(
                run,
                about.model,
                about.data,
                about.num_params,
                digest(setup.identity),
                setup.identity["kernels.set"],
                tuple(about.num_train // run.train.batch_of(epoch) for epoch in range(run.train.epochs)),
                tuple(every),
                {key: float(value) for key, value in predicted.items() if key.endswith("_s")},
                source,
                predict_memory(setup, replace(plan, data=dealt.mesh.data.size)),
                state_bytes,
            )
        )
    return Paused("--dry-run: the first steps were done in memory, and nothing was written")


def _do_steps(engine: Engine) -> list[tuple[float, StepResult]]:
    """Seconds of each of the first steps, and its result; of a round, of one of its steps."""
    found, last = [], time.perf_counter()
    for result in islice(engine.epoch(lambda step: True, lambda: (False, False)), _ROUNDS):
        now = time.perf_counter()
        found.append(((now - last) / result.steps, result))
        last = now
    return found


def _where(dealt: Dealt) -> dict[str, Any]:
    """This worker, and its place in the plan."""
    mesh, plan, device = dealt.mesh, dealt.plan, dealt.setup.device
    lanes = worker_lanes(dealt.setup.run.train.lanes, mesh.data.size, mesh.data.rank)
    stage = mesh.world.rank // (mesh.data.size * plan.cells)
    return {
        "worker": mesh.world.rank,
        "host": socket.gethostname(),
        "device": f"{device}, {name_device(device)}",
        "backend": mesh.world.backend,
        "lanes": [lanes.start, lanes.stop - 1],
        "stage": stage if plan.pipeline > 1 else None,
        "plan": str(plan) if plan.splits else "",
    }
