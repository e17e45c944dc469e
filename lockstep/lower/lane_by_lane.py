"""The reference: runs a step's lanes one after another, each at its own shape, with any module.

A gradient starts here: backward → lane tree → optimizer. It works with any `nn.Module`. Every other way to
run lanes with the same kernels must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import Lanes
from lockstep.kernels import random
from lockstep.kernels.dropout import Drop, dropout, dropout_channels, find_drop
from lockstep.kernels.loss import Loss, heads_loss
from lockstep.kernels.numerics import half_precision, seed_stream
from lockstep.kernels.structure import leaves
from lockstep.lower.layer_split import LayerSplit
from lockstep.lower.param_gradient import OnGradient, ghost, own_gradients, take_gradient
from lockstep.lower.recompute import RecomputedBlocks, buffers_of
from lockstep.models.tensors import buffer_slots
from lockstep.spec.rule.loss_scale import LossScale


@dataclass
class LaneOutput:
    """The results of one lane, or their sum over a subtree of lanes; the lane tree may write into them."""

    loss: Tensor
    logits: Tensor  # what the model gives; of several tensors, the first
    grads: list[Tensor]
    float_buffers: list[Tensor]
    int_buffers: list[Tensor]
    height: int = 0  # of the subtree; 0 is one lane


class LaneByLane:
    """Runs a model's lanes one after another with stock kernels."""

    def __init__(
        self, model: nn.Module, loss: Loss, seed: int, half: torch.dtype | None,
        split: LayerSplit | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.split = model, loss, split
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad and not p.is_meta}
        self._float_slots = buffer_slots(model, floating=True)
        self._int_slots = buffer_slots(model, floating=False)
        self._seed, self._half = seed, half
        self._step, self._lane = 0, 0
        self.hands_over = False  # give every lane's gradients to `early`, and keep none
        self.scale: LossScale | None = None  # of the loss in the backward pass; gradients are without it
        self._recomputed: RecomputedBlocks | None = None
        self._keyed_modules: list[nn.Module] = []
        self._key_dropout()

    def recompute(self) -> None:
        """Keep less in memory from now on: compute the model's blocks again in the backward pass."""
        self._recomputed = RecomputedBlocks(self.model)

    def run(self, lanes: Lanes, step: int, early: OnGradient | None = None) -> Iterator[LaneOutput]:
        """Yield the output of each lane in order; the model's buffers end as they were at the step's start.

        During the last lane, `early` gets each gradient as soon as it is known. If it `hands_over`, this
        holds for every lane, and the gradients that it yields are zeros without memory.
        """
        self.model.train()
        before = [b.clone() for b in self.buffers()]
        for lane in range(lanes.num_lanes):
            last = self.hands_over or lane == lanes.num_lanes - 1
            try:
                output = self._run_lane(*lanes.lane(lane), step, lanes.first + lane, early if last else None)
            finally:
                if before:
                    torch._foreach_copy_(self.buffers(), before)
            yield output

    def first_bad(self, lanes: Lanes, step: int) -> str | None:
        """Where a value is first not finite: the images, a parameter, an output, the loss or a gradient."""
        for lane in range(lanes.num_lanes):
            if not lanes.lane(lane)[0].isfinite().all():
                return f"the images of lane {lanes.first + lane}"
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                return f"parameter '{name}'"
        bad: list[str] = []
        handles = [
            module.register_forward_hook(partial(_note_bad, bad, name))
            for name, module in self.model.named_modules()
            if not any(module.children())
        ]
        try:
            for lane, output in enumerate(LaneByLane.run(self, lanes, step)):
                bad += ["loss"] if not output.loss.isfinite() else []
                pairs = zip(reversed(self.params), reversed(output.grads), strict=True)
                bad += [f"gradient of '{name}'" for name, grad in pairs if not grad.isfinite().all()]
                if bad:
                    return f"{bad[0]} in lane {lanes.first + lane}"
        finally:
            for handle in handles:
                handle.remove()
        return None

    def _run_lane(
        self, images: Tensor, labels: Any, step: int, lane: int, early: OnGradient | None
    ) -> LaneOutput:
        self._step, self._lane = step, lane
        seed_stream(images.device, random.key("lane", self._seed, step, lane))
        before = self._copy_buffers() if self._recomputed else []
        with half_precision(images.device, self._half):
            outputs = self.split.forward(images) if self.split else self.model(images)
        loss = self._find_loss(outputs, labels)
        grads, buffers = self._backward(loss, before, early)
        return LaneOutput(
            loss.detach().float().clone(),
            leaves(outputs)[0].detach(),
            grads if self.hands_over else own_gradients(grads),
            buffers[: len(self._float_slots)],
            buffers[len(self._float_slots) :],
        )

    def _backward(
        self, loss: Tensor, before: list[Tensor], early: OnGradient | None
    ) -> tuple[list[Any], list[Tensor]]:
        """Gradients, and the buffers that the lane leaves; `before` are those with which blocks ran."""
        after = self._copy_buffers() if before else None
        slots = [*self._float_slots.values(), *self._int_slots.values()] if before else []
        with buffers_of(slots, before):
            return self._gradients([self._scaled(loss)], early), after or self._copy_buffers()

    def _copy_buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.buffers()]

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss that the backward pass begins with."""
        return loss * self.scale.value if self.scale else loss

    def _find_loss(self, outputs: Any, labels: Any) -> Tensor:
        return heads_loss(self.loss, outputs, labels, getattr(self.model, "aux_weight", 0.0))

    def _gradients(
        self,
        outputs: list[Tensor],
        early: OnGradient | None,
        given: Sequence[Tensor] | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> list[Any]:
        """The backward pass: gradients of parameters, then of `inputs`, None for one that is not used.

        `given` are those of `outputs`; a loss needs none.
        `early` gets each parameter's gradient when it is complete. The hooks exist only during this call,
        because a model or loss may itself compute gradients in the forward pass. They come after the model's
        own hooks.
        """
        params: list[Any] = list(self.params.values())
        gives = early if not self.split else None
        take = partial(take_gradient, gives, self.hands_over, self.scale)
        hooked = params if gives or self.scale else ()
        handles = [p.register_hook(partial(take, i)) for i, p in enumerate(hooked)]
        try:
            found = torch.autograd.grad(outputs, [*params, *inputs], given, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        grads = [self._unused(p) if g is None else g for p, g in zip(params, found, strict=False)]
        if self.split:
            grads = self._finish(self.split, grads, early)
        return [*grads, *found[len(params) :]]

    def _finish(self, split: LayerSplit, grads: list[Tensor], early: OnGradient | None) -> list[Tensor]:
        """Whole gradients, of parts of them; only then can they be given away."""
        with torch.no_grad():
            whole = split.finish(dict(zip(self.params, grads, strict=True)))
        grads = [whole[name] for name in self.params]
        for index, grad in enumerate(grads):
            if early:
                early(index, grad)
        return [ghost(grad) for grad in grads] if early and self.hands_over else grads

    def own_means(self) -> dict[str, Tensor]:
        """Mean gradients over the lanes of all workers, by name, of parameters that are not in `params`."""
        return {}

    def _unused(self, parameter: Tensor) -> Tensor:
        """The gradient of a parameter that the loss does not depend on."""
        return ghost(parameter) if self.hands_over else torch.zeros_like(parameter)

    def buffers(self) -> list[Tensor]:
        """The model's buffers, floating ones first."""
        return [*self.float_buffers(), *self.int_buffers()]

    def int_names(self) -> list[str]:
        """Names of the buffers that are not floating."""
        return list(self._int_slots)

    def float_names(self) -> list[str]:
        """Names of the floating buffers."""
        return list(self._float_slots)

    def float_buffers(self) -> list[Tensor]:
        """The model's floating buffers."""
        return [table[key] for table, key in self._float_slots.values()]

    def int_buffers(self) -> list[Tensor]:
        return [table[key] for table, key in self._int_slots.values()]

    def _key_dropout(self) -> None:
        """Replace the forward of every dropout layer by one whose mask is keyed by the layer's name."""
        for name, module in self.model.named_modules():
            found = find_drop(module)
            replaced = module.__dict__.get("forward")
            if found and (replaced is None or hasattr(replaced, "keyed")):  # else the user replaced it
                module.forward = self._keyed(*found, module, name)
                self._keyed_modules.append(module)

    def _keyed(self, drop: Drop, rate: str, module: Any, name: str) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            p, places = getattr(module, rate), None
            if not module.training or not p:
                return x
            if self.split and drop in (dropout, dropout_channels):  # stochastic depth drops whole samples
                places = self.split.places(name, drop is dropout, x.device)
            return drop(x, p, random.key("dropout", self._seed, self._step, self._lane, name), places)

        forward.keyed = True  # type: ignore[attr-defined]
        return forward

    def release(self) -> None:
        """Restore the forward of blocks and of dropout layers."""
        if self._recomputed:
            self._recomputed.release()
        for module in self._keyed_modules:
            module.__dict__.pop("forward", None)


def _note_bad(bad: list[str], name: str, module: nn.Module, inputs: object, output: object) -> None:
    if not all(part.isfinite().all() for part in leaves(output)):
        bad.append(f"output of '{name}' ({type(module).__name__})")
