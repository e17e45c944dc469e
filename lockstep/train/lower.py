"""A model and a kernel set become something that runs the lanes of a step.

The choice is a lookup, never a timing. Operations that take all lanes at once are chosen here, and must
give the bits of the reference, which runs one lane after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.data.loader import Lanes
from lockstep.errors import ModelError, SpecError
from lockstep.spec import Run, Train
from lockstep.train.lane import LaneByLane
from lockstep.train.loss import CrossEntropy, Loss
from lockstep.train.together import Together, chain_of, same_bits

if TYPE_CHECKING:
    from lockstep.kernels.device.flat import DeviceNetwork
    from lockstep.kernels.device.layer import Layer
    from lockstep.kernels.device.table import Table
    from lockstep.train.chain import Chain
    from lockstep.train.device_lanes import Form
    from lockstep.train.inference import Inference
    from lockstep.train.residual import Residuals


@dataclass(frozen=True)
class Sample:
    """A step's lanes, for their shapes; and what was found out before, as every generation has its number."""

    read: Callable[[], Lanes]
    known: dict[int, bool] = field(default_factory=dict)  # whether so many lanes give the reference's bits


def lower(
    model: nn.Module,
    loss: Loss,
    *,
    seed: int,
    bf16: bool,
    rounds: bool = False,
    sample: Sample | None = None,
) -> LaneByLane:
    """Choose how a model's lanes run with stock kernels.

    A small chain of stock layers runs all lanes together if, on fixed values, every bit is the reference's.
    With a wire type that `rounds` every node of the tree, only the reference does.
    """
    reference = LaneByLane(model, loss, seed, bf16)
    chain = chain_of(model)
    if chain is None or sample is None or bf16 or rounds:
        return reference
    lanes, together, known = sample.read(), Together(model, loss, seed, chain), sample.known
    if lanes.num_lanes not in known:
        small = lanes.num_lanes > 1 and together.is_small(lanes)
        known[lanes.num_lanes] = small and same_bits(together, reference, lanes)
    return together if known[lanes.num_lanes] else reference


@dataclass(frozen=True)
class DevicePlan:
    """How whole steps run on the device: a model in the form that its kernels take, and a table of tiles."""

    form: Form
    table: Table
    train: Train
    device: torch.device
    _networks: dict[int, DeviceNetwork] = field(default_factory=dict)

    def network(self, lanes: int) -> DeviceNetwork:
        """Buffers and kernels for so many lanes; a chain's evaluation shares them."""
        if lanes not in self._networks:
            self._networks.clear()
            self._networks[lanes] = self.form.make(lanes, self.train, self.device, self.table)
        return self._networks[lanes]

    def inference(self, lanes: int) -> tuple[Inference, Callable[[nn.Module], None]]:
        """What evaluates so many blocks at once, or fewer, and how it takes a model's weights."""
        from lockstep.kernels.device.network import Network
        from lockstep.kernels.device.residual_inference import ResidualInference
        from lockstep.train.compiled import Compiled
        from lockstep.train.device_lanes import load
        from lockstep.train.inference import StockInference, fix_weights
        from lockstep.train.residual import Residuals

        if isinstance(self.form, Residuals):
            units = self.form.units, self.form.head
            residual = ResidualInference(*units, lanes, self.train, self.device, self.table)

            def take(model: nn.Module) -> None:
                load(self.form, residual, model)
                residual.fold()

            return residual, take
        if isinstance(self.form, Compiled):
            fixed = fix_weights(self.form.model.module, self.train.precision)
            size = self.train.batch // self.train.lanes
            stock = StockInference(replace(self.form.model, module=fixed), size, self.train, self.device)
            return stock, stock.load
        network = self.network(lanes)
        assert isinstance(network, Network)
        return network, partial(load, self.form, network)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The fused layers; a model that torch compiles has none."""
        return getattr(self.form, "layers", ())

    @property
    def is_fused(self) -> bool:
        return bool(self.layers)

    @property
    def shares_norms(self) -> bool:
        """Whether it has batch norms that can see all lanes."""
        return self.is_fused and hasattr(self.form, "units")

    def facts(self) -> dict[str, str]:
        """What of it may change bits."""
        import triton

        triton_facts = triton.__version__ + (" interpreted" if triton.knobs.runtime.interpret else "")
        if not self.is_fused:
            return {
                "set": "compiled",
                "convolutions": getattr(self.form, "digest", ""),
                "triton": triton_facts,
            }
        tiles = self.table.digest(self.layers, self.train.precision)
        return {"set": "fused", "tiles": tiles, "triton": triton_facts}


def plan_device(
    run: Run,
    model: nn.Module,
    loss: Loss,
    shape: tuple[int, int, int],
    device: torch.device,
    trains: bool = True,
) -> DevicePlan | None:
    """How whole steps run on the device; None for stock kernels through the host.

    `auto` takes fused kernels where they are known to pay, else lets torch compile what it can. A plan for a
    run that `trains` no more is for inference only.
    """
    wanted, plan = run.kernels.set, None
    sets = _auto_sets(run, device) if wanted == "auto" else (wanted,)
    for kernels in sets:
        if kernels == "stock":
            continue
        try:
            plan = _plan(run, kernels, model, loss, shape, device, trains)
            break
        except ModelError as error:
            if wanted != "auto":
                also = " and train.sync_norm=false" if run.train.sync_norm else ""
                raise ModelError(f"kernels.set={wanted}: {error}: use kernels.set=auto{also}") from None
    if trains and run.kernels.table and not Path(run.kernels.table).is_file():
        raise SpecError(f"kernels.table={run.kernels.table}: there is no such file")
    if trains and run.train.sync_norm and not (plan and plan.shares_norms):
        fix = "" if wanted == "fused" else "kernels.set=fused with a resnet on a GPU, or "
        raise ModelError(
            "train.sync_norm=true: only residual networks with fused kernels have batch norms that see all "
            f"lanes: use {fix}train.sync_norm=false"
        )
    return plan


def _auto_sets(run: Run, device: torch.device) -> tuple[str, ...]:
    """What `auto` tries, in order: a lookup by device and precision."""
    if device.type != "cuda" or run.train.precision == "fp32":
        return ()
    return ("fused", "compiled") if run.train.precision == "bf16" else ("fused",)


def _plan(
    run: Run,
    kernels: str,
    model: nn.Module,
    loss: Loss,
    shape: tuple[int, int, int],
    device: torch.device,
    trains: bool,
) -> DevicePlan:
    if not find_spec("triton"):
        raise ModelError("the package triton is not installed")
    from lockstep.kernels.device import is_usable
    from lockstep.kernels.device.table import Table, find_table, moves_boxes

    if not is_usable(device):
        raise ModelError(f"its kernels do not run on {device.type}")
    if not isinstance(loss, CrossEntropy):
        raise ModelError("it has no loss but cross_entropy")
    if kernels == "compiled":
        from lockstep.train.compiled import find_compiled

        return DevicePlan(find_compiled(model, shape, run.train, trains), Table(), run.train, device)
    # a residual network's kernels pay with copies by boxes, which are for bf16
    residual = run.kernels.set == "fused" or (run.train.precision == "bf16" and moves_boxes(device))
    form = _find_form(model, shape, residual)
    if max(layer.num_values for layer in form.layers) * run.train.batch >= 2**31:
        raise ModelError(f"train.batch={run.train.batch} is too large: a layer has more than 2^31 values")
    path = Path(run.kernels.table) if run.kernels.table else None
    return DevicePlan(form, find_table(device, path), run.train, device)


def _find_form(model: nn.Module, shape: tuple[int, int, int], residual: bool) -> Chain | Residuals:
    """The model as fused layers."""
    from lockstep.train.chain import find_chain
    from lockstep.train.residual import find_residual

    form = find_chain(model, shape) or (find_residual(model, shape) if residual else None)
    if form is None:
        raise ModelError(
            "the model is no chain of convolutions (stride 1, with bias), ReLU, 2x2 max pooling, fully "
            "connected layers, and dropout after the ReLU of one, and no resnet with the small stem"
        )
    return form
