"""Compiles every kernel of a step for an NVIDIA H200, which needs no GPU; prints the name of each.

The interpreter runs kernels as Python: what Triton's compiler refuses, it does not see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.data.augment import Augment
from lockstep.data.store import MemorySplit
from lockstep.kernels.device import table
from lockstep.kernels.device.data import data_grad
from lockstep.kernels.device.layer import Layer
from lockstep.kernels.device.watch import watch_compiler
from lockstep.models import build
from lockstep.models.resnet import BasicBlock
from lockstep.spec import Model, Optimizer, Run, Train
from lockstep.spec.run import OPTIMIZERS
from lockstep.train.chain import find_chain
from lockstep.train.compiled import find_compiled
from lockstep.train.device import DeviceStep
from lockstep.train.device_lanes import DeviceLanes, Form
from lockstep.train.lower import DevicePlan
from lockstep.train.residual import find_residual
from lockstep.train.state import TrainState

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
sys.path.append(str(Path(__file__).parents[1]))
from tiny_resnet import TinyResNet  # noqa: E402

H200 = GPUTarget("cuda", 90, 32)
TABLE = Path(table.__file__).parent / "tables" / "nvidia-h200.toml"
seen: set[str] = set()


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
    """In place of a launch, which first binds the arguments as here."""
    create_function_from_signature(self.signature, self.params, make_backend(H200))(*args, **given)
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    values = {**dict(zip(self.arg_names, args, strict=False)), **given}
    signature, constants, hints = {}, {}, {}
    for index, name in enumerate(self.arg_names):
        value = values[name]
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            hints[(index,)] = [["tt.divisibility", 16]]
        elif self.params[index].is_constexpr or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    key = repr((self.fn.__name__, signature, constants, options))
    if key not in seen:
        seen.add(key)
        source = ASTSource(self, signature, constants, hints)
        compiled = triton.compile(source, target=H200, options=options)
        assert compiled.metadata.shared <= 227 * 1024, (self.fn.__name__, compiled.metadata.shared)
        if "_box_" in self.fn.__name__ and values.get("NX", 1) * values.get(
            "NY", 1
        ):  # the operands of a product go from memory to it by themselves
            assert all(part in compiled.asm["ptx"] for part in ("cp.async.bulk.tensor", "wgmma"))
            loads = compiled.asm["ttgir"].count("ttg.local_load")
            read = [values.get(name) for name in ("other", "y", "z", "residual")]
            assert loads == sum(value is not None for value in read), loads
        print(self.fn.__name__, flush=True)


def main(model_name: str, precision: str) -> None:
    JITFunction.run = compile_only
    watch_compiler()
    if model_name == "narrow":  # columns that a compiler would divide in 8 bits
        layer = Layer(11, 12, 2, 9, (3, 2), (0, 0), relu=False, bias=False)
        dz, w = torch.zeros(4, *layer.grad_shape), torch.zeros(layer.depth * 9)
        data_grad(layer, dz, w, torch.zeros(4, 11, 12, 2), table.rule("input_grad", layer, precision))
        return
    channels = 1 if model_name == "emotion48" else 3
    size = 48 if model_name == "emotion48" else 32
    shape = (channels, size, size)
    model: nn.Module
    if model_name == "residual":
        model = TinyResNet(BasicBlock(8, 64, 2), BasicBlock(64, 128, 2), channels=128)
    elif model_name == "compiled":  # small: its convolutions are stock ones, which run here
        model = TinyResNet(BasicBlock(8, 16, 2), channels=16)
    else:
        sizes = {"in_channels": channels, "num_classes": 7, "image_size": (size, size)}
        model = build(model_name, **sizes, options={"dropout": 0.5})
    split = MemorySplit(torch.zeros(16, *shape, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64))
    form: Form | None = find_chain(model, shape) or find_residual(model, shape)
    if model_name == "compiled":
        form = find_compiled(model, shape, Train(batch=16, lanes=2, precision=precision))
    assert form
    tiles = table.find_table(torch.device("cpu"), TABLE)
    for number, name in enumerate(OPTIMIZERS if model_name == "emotion48" else ["sgd"]):
        train = Train(batch=16, lanes=2, precision=precision, ema=0.9 if number else 0.0)
        run = Run(model=Model(model_name), train=train, optimizer=Optimizer(name, weight_decay=0.1))
        state = TrainState.begin(model, run.optimizer, train.ema)
        augment = Augment(0, True, 2, 4, (0.5,) * channels, (0.5,) * channels)
        step = DeviceStep(
            run,
            state,
            DeviceLanes(model, DevicePlan(form, tiles, train, torch.device("cpu")), 0),
            split,
            augment,
            range(2),
        )
        step.begin_epoch()
        step.run_alone()
    if model_name == "residual":
        inference, load = DevicePlan(form, tiles, train, torch.device("cpu")).inference(2)
        load(model)
        inference.forward(training=False)
        inference.score()


if __name__ == "__main__":
    main(*sys.argv[1:])
