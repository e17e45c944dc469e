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

OnGradient = Callable[[int, Tensor], None]  # gets the number of a parameter and its gradient


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
        self, model: nn.Module, loss: Loss, seed: int, bf16: bool, split: LayerSplit | None = None
    ) -> None:
        self.model, self.loss, self.split = model, loss, split
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad and not p.is_meta}
        self._float_slots = _buffer_slots(model, floating=True)
        self._int_slots = _buffer_slots(model, floating=False)
        self._seed, self._bf16 = seed, bf16
        self._step, self._lane = 0, 0
        self.hands_over = False  # give every lane's gradients to `early`, and keep none
        self._keyed_modules: list[nn.Module] = []
        self._key_dropout()

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
        with half_precision(images.device, self._bf16):
            outputs = self.split.forward(images) if self.split else self.model(images)
        loss = self._find_loss(outputs, labels)
        grads = self._gradients([loss], early)
        return LaneOutput(
            loss.detach().float().clone(),
            leaves(outputs)[0].detach(),
            grads if self.hands_over else own_gradients(grads),
            [b.clone() for b in self.float_buffers()],
            [b.clone() for b in self.int_buffers()],
        )

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
        give = partial(_hand_over, early, self.hands_over) if early and not self.split else None
        handles = [p.register_hook(partial(give, i)) for i, p in enumerate(params) if give]
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
        for index, grad in enumerate(grads if early else ()):
            _hand_over(early, False, index, grad)  # type: ignore[arg-type]
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
        """Restore the forward of the dropout layers."""
        for module in self._keyed_modules:
            module.__dict__.pop("forward", None)


def _buffer_slots(model: nn.Module, floating: bool) -> dict[str, tuple[dict[str, Any], str]]:
    """The dictionary and key of each buffer, not the tensor itself, which a module may replace."""
    return {
        name: (model.get_submodule(name.rpartition(".")[0])._buffers, name.rpartition(".")[2])
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() == floating and not buffer.is_meta
    }


def own_gradients(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that share no memory: autograd may give one tensor to two parameters, or expand one."""
    owned: list[Tensor] = []
    seen: set[int] = set()
    for grad in grads:
        shared = grad.data_ptr() in seen or 0 in grad.stride()
        owned.append(grad.clone(memory_format=torch.contiguous_format) if shared else grad)
        seen.add(grad.data_ptr())
    return owned


def _hand_over(early: OnGradient, and_forget: bool, index: int, grad: Tensor | None) -> Tensor | None:
    if grad is not None:
        early(index, grad.detach())
    return ghost(grad) if grad is not None and and_forget else None


def ghost(like: Tensor) -> Tensor:
    """Zeros of the same shape that take the memory of one element."""
    return like.new_zeros(()).expand(like.shape)


def _note_bad(bad: list[str], name: str, module: nn.Module, inputs: object, output: object) -> None:
    if not all(part.isfinite().all() for part in leaves(output)):
        bad.append(f"output of '{name}' ({type(module).__name__})")
