"""A model and a kernel set become something that runs the lanes of a step.

A gradient starts here: backward → lane tree → optimizer. This is the reference: one lane after another,
with any `nn.Module`, each at its own fixed shape. Operations of ours that take all lanes in one launch
will be chosen here, block by block, and must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.dropout import dropout, dropout_channels
from lockstep.train.loss import Loss, heads_loss

_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass
class LaneOutput:
    """What one lane gives: fresh tensors that the lane tree may write into."""

    loss: Tensor
    correct: Tensor
    grads: list[Tensor]
    float_buffers: list[Tensor]
    int_buffers: list[Tensor]


class LaneByLane:
    """Runs a model's lanes one after another with stock kernels."""

    def __init__(self, model: nn.Module, loss: Loss, seed: int, bf16: bool) -> None:
        self.model, self.loss = model, loss
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        buffers = dict(model.named_buffers())
        self.float_buffers = {name: b for name, b in buffers.items() if b.is_floating_point()}
        self.int_buffers = {name: b for name, b in buffers.items() if not b.is_floating_point()}
        self._seed, self._bf16 = seed, bf16
        self._step, self._lane = 0, 0
        self._key_dropout()

    def run(self, lanes: Lanes, step: int) -> Iterator[LaneOutput]:
        """The lanes in order; afterwards the model's buffers are again those of the step's start."""
        before = [b.clone() for b in self.buffers()]
        for lane in range(lanes.num_lanes):
            try:
                yield self._run_lane(*lanes.lane(lane), step, lane)
            finally:
                if before:
                    torch._foreach_copy_(self.buffers(), before)

    def first_bad(self, lanes: Lanes, step: int) -> str:
        """Where a value first stops being finite: a parameter, an output, the loss or a gradient."""
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                return f"parameter '{name}'"
        for lane in range(lanes.num_lanes):
            bad: list[str] = []
            handles = [
                module.register_forward_hook(partial(_note_bad, bad, name))
                for name, module in self.model.named_modules()
                if not any(module.children())
            ]
            try:
                output = self._run_lane(*lanes.lane(lane), step, lane)
            finally:
                for handle in handles:
                    handle.remove()
            bad += ["loss"] if not output.loss.isfinite() else []
            pairs = zip(reversed(self.params), reversed(output.grads), strict=True)
            bad += [f"gradient of '{name}'" for name, grad in pairs if not grad.isfinite().all()]
            if bad:
                return f"{bad[0]} in lane {lane}"
        return "the sum over lanes"

    def _run_lane(self, images: Tensor, labels: Tensor, step: int, lane: int) -> LaneOutput:
        self._step, self._lane = step, lane
        self._seed_stream(images.device, random.key("lane", self._seed, step, lane))
        self.model.train()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._bf16):
            outputs = self.model(images)
        loss = heads_loss(self.loss, outputs, labels, getattr(self.model, "aux_weight", 0.0))
        params = list(self.params.values())
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        logits = (outputs[0] if isinstance(outputs, tuple) else outputs).detach()
        return LaneOutput(
            loss.detach().float().clone(),
            (logits.argmax(1) == labels).sum(),
            [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)],
            [b.clone() for b in self.float_buffers.values()],
            [b.clone() for b in self.int_buffers.values()],
        )

    @staticmethod
    def _seed_stream(device: torch.device, key: int) -> None:
        """For randomness inside a module that we cannot key by name: one stream a lane."""
        if device.type == "cuda":
            torch.cuda.manual_seed(key)
        else:
            torch.default_generator.manual_seed(key)  # torch.manual_seed would visit every backend

    def buffers(self) -> list[Tensor]:
        """The model's buffers, floating ones first."""
        return [*self.float_buffers.values(), *self.int_buffers.values()]

    def _key_dropout(self) -> None:
        """Give every dropout layer a mask keyed by its name in place of the one from a stream."""
        for name, module in self.model.named_modules():
            if type(module) is nn.Dropout:
                module.forward = self._keyed(dropout, module, name)  # type: ignore[method-assign,assignment]
            elif type(module) in _CHANNEL_DROPOUTS:
                module.forward = self._keyed(dropout_channels, module, name)

    def _keyed(
        self, drop: Callable[[Tensor, float, int], Tensor], module: nn.Module, name: str
    ) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if not module.training or not module.p:
                return x
            return drop(x, float(module.p), random.key("dropout", self._seed, self._step, self._lane, name))  # type: ignore[arg-type]

        return forward

    def release(self) -> None:
        """Give the dropout layers their own forward back."""
        for module in self.model.modules():
            if isinstance(module, (nn.Dropout, *_CHANNEL_DROPOUTS)):
                module.__dict__.pop("forward", None)


def lower(model: nn.Module, loss: Loss, kernel_set: str, *, seed: int, bf16: bool) -> LaneByLane:
    """Choose how a model's lanes run; `stock` is what there is."""
    assert kernel_set == "stock", kernel_set
    return LaneByLane(model, loss, seed, bf16)


def resolve_kernels(kernel_set: str) -> str:
    """The kernel set that `auto` means for this model and device: a lookup, never a timing."""
    return "stock" if kernel_set == "auto" else kernel_set


def _note_bad(bad: list[str], name: str, module: nn.Module, inputs: object, output: object) -> None:
    parts = output if isinstance(output, tuple) else (output,)
    if any(isinstance(part, Tensor) and not part.isfinite().all() for part in parts):
        bad.append(f"output of '{name}' ({type(module).__name__})")
