"""A lane's way through one stage, in training and in evaluation: receive, compute, send on.

If the model draws from torch's generator, the generator's state goes from stage to stage with the lane. So
every stage draws what it would draw in the uncut model.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.parallel.stage import Passed, Stage
from lockstep.parallel.stage_link import StageLink
from lockstep.parallel.tensor_form import Form, form_of


class StageTurns:
    """Takes lanes through a stage, one after another."""

    def __init__(self, stage: Stage, link: StageLink, draws: bool, device: torch.device) -> None:
        self._stage, self._link, self._draws, self._device = stage, link, draws, device
        self._forms = [value.form for value in stage.received]
        if draws:
            self._forms.append(form_of(self._generator()))

    def expect(self, count: int) -> list[Future[list[Tensor]]]:
        """Start to receive what the next lanes need; the first stage gets images instead."""
        if self._stage.is_first:
            return []
        return [self._link.receive(self._stage.number - 1, self._expected) for _ in range(count)]

    def forward(self, given: Sequence[Tensor]) -> Passed:
        """Compute a lane, and send on what the next stage needs; `given` is what arrived, or the images."""
        stage = self._stage
        if self._draws and not stage.is_first:
            *given, state = given
            self._set_generator(state)
        passed = stage.forward(given)
        if not stage.is_last:
            self._check(passed.sent)
            also = [self._generator()] if self._draws else []
            self._link.send(stage.number + 1, [*passed.sent, *also])
        return passed

    def _expected(self) -> list[Form]:
        return self._forms

    def _check(self, tensors: Sequence[Tensor]) -> None:
        stage = self._stage
        for value, tensor in zip(stage.sent, tensors, strict=True):
            if form_of(tensor) != value.form:
                raise LockstepError(
                    f"'{value.key}', from stage {stage.number} to stage {stage.number + 1}, is "
                    f"{form_of(tensor)} and was {value.form}: in a pipeline a model must compute alike in "
                    "every step"
                )

    def _generator(self) -> Tensor:
        on_gpu = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if on_gpu else torch.get_rng_state()
        return state.to(self._device)

    def _set_generator(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state.cpu(), self._device)
        else:
            torch.set_rng_state(state)
