"""Compiles every kernel of a step for an NVIDIA H200, which needs no GPU; prints the name of each.

The interpreter runs kernels as Python: what Triton's compiler refuses, it does not see. Cases come as lines;
each has a process of its own, forked from one that has imported all and read the compiler once.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import triton
from h200 import H200
from torch import nn
from triton.runtime import driver
from triton.runtime.cache import triton_key

from lockstep.data.augment import Augment
from lockstep.data.store import MemorySplit
from lockstep.kernels.triton.batch_gather import Move, gather_batch
from lockstep.kernels.triton.compile_ahead import nothing_started
from lockstep.kernels.triton.compiler_watch import watch_compiler
from lockstep.kernels.triton.conv import tile_table as table
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.strided_gradient import data_grad
from lockstep.lower.compiled.compiled_program import find_compiled
from lockstep.lower.device_lanes import DeviceLanes
from lockstep.lower.fused.chain_program import find_chain
from lockstep.lower.fused.residual_program import find_residual
from lockstep.lower.program import DeviceLowering, Program
from lockstep.models import build
from lockstep.models.resnet import BasicBlock
from lockstep.runs.train_state import TrainState
from lockstep.spec import Model, Optimizer, Run, Train
from lockstep.spec.rule.loss_scale import begin_scale
from lockstep.spec.rule.optimizer_rule import RULES
from lockstep.train.device.device_step import DeviceStep

sys.path.append(str(Path(__file__).parents[1]))
from lower.mobile_nets import mobile
from tiny_resnet import TinyResNet

TABLE = Path(table.__file__).parent / "tables" / "nvidia-h200.toml"


def check(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
    """Hears of every kernel."""
    name, names = src.fn.__name__, src.fn.arg_names
    assert metadata["shared"] <= 227 * 1024, (name, metadata["shared"])
    given = {**dict.fromkeys(names), **src.signature, **{names[i]: v for (i,), v in src.constants.items()}}
    if "_box_" in name and given.get("NX", 1) * given.get("NY", 1):
        # the operands of a product go from memory to it by themselves
        ptx, ttgir = (read(metadata_group, kind) for kind in (".ptx", ".ttgir"))
        assert all(part in ptx for part in ("cp.async.bulk.tensor", "wgmma"))
        others = [given.get(other) for other in ("other", "y", "z", "residual")]
        assert ttgir.count("ttg.local_load") == sum(other is not None for other in others), name
    print(name, flush=True)


def read(files: dict[str, str], kind: str) -> str:
    return next(Path(path).read_text() for name, path in files.items() if name.endswith(kind))


def main(model_name: str, precision: str) -> None:
    driver.set_active(H200())
    triton.knobs.compilation.listener = check
    watch_compiler()
    with nothing_started():
        compile_all(model_name, precision)


def gather_narrow(size: int) -> None:
    """Small grey images with every augmentation."""
    images, numbers = torch.zeros(4, 1, size, size, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.int64)
    one, cursor = torch.zeros(1), torch.zeros((), dtype=torch.int32)
    out, labels = torch.zeros(4, size, size, 1), torch.zeros(4, dtype=torch.int32)
    move = Move(crop=4, flip=True, cutout=8)
    keys = torch.zeros(5, dtype=torch.int64)
    gather_batch(images, numbers[0], numbers, numbers, cursor, cursor, keys, (one, one), out, labels, move)


def compile_all(model_name: str, precision: str) -> None:
    if model_name == "narrow":  # numbers that a compiler would divide or add in 8 bits
        layer = Layer(11, 12, 2, 9, (3, 2), (0, 0), relu=False, bias=False)
        dz, w = torch.zeros(4, *layer.grad_shape), torch.zeros(layer.depth * 9)
        data_grad(layer, dz, w, torch.zeros(4, 11, 12, 2), table.tile_rule("input_grad", layer, precision))
        for size in (8, 32):
            gather_narrow(size)
        return
    channels = 1 if model_name == "emotion48" else 3
    size = 48 if model_name == "emotion48" else 32
    shape = (channels, size, size)
    model: nn.Module
    if model_name == "residual":
        model = TinyResNet(BasicBlock(8, 64, 2), BasicBlock(64, 128, 2), channels=128)
    elif model_name == "compiled":  # small: its convolutions are stock ones, which run here
        model = TinyResNet(BasicBlock(8, 16, 2), channels=16)
    elif model_name == "mobile":
        model = mobile()
    else:
        sizes = {"in_channels": channels, "num_classes": 7, "image_size": (size, size)}
        model = build(model_name, **sizes, options={"dropout": 0.5})
    split = MemorySplit(torch.zeros(16, *shape, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64))
    program: Program | None = find_chain(model, shape) or find_residual(model, shape)
    if model_name in ("compiled", "mobile"):
        program = find_compiled(model, shape, Train(batch=16, lanes=2, precision=precision))
    assert program
    tiles = table.find_table(torch.device("cpu"), TABLE)
    on_device = [name for name, rule in RULES.items() if rule.whole != "matrix"]
    for number, name in enumerate(on_device if model_name == "emotion48" else ["sgd"]):
        train = Train(batch=16, lanes=2, precision=precision, ema=0.9 if number else 0.0)
        run = Run(model=Model(model_name), train=train, optimizer=Optimizer(name, weight_decay=0.1))
        state = TrainState.begin(model, run.optimizer, train.ema)
        state.scale = begin_scale(precision, train.loss_scale)
        augment = Augment(0, True, 2, 4, (0.5,) * channels, (0.5,) * channels)
        step = DeviceStep(
            run,
            state,
            DeviceLanes(model, DeviceLowering(program, tiles, train, torch.device("cpu")), 0),
            split,
            augment,
            range(2),
        )
        step.begin()
        step.run_alone()
    if model_name == "residual":
        inference, load = DeviceLowering(program, tiles, train, torch.device("cpu")).eval_network(2)
        load(model)
        inference.forward(training=False)
        inference.score()


def serve() -> None:
    """Of each case its kernels, then `.` and how its process ended."""
    triton_key()  # a hash of Triton's files, kept from here on
    for line in sys.stdin:
        if not (child := os.fork()):
            code = 1
            try:
                main(*line.split())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(".", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
