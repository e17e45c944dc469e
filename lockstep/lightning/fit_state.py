"""What a worker has while it fits: the module's gradients and buffers, summed over lanes, and its facts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

import lockstep
from lockstep.comm.group import Group
from lockstep.comm.tree import tree_sum
from lockstep.errors import GroupLost, IdentityError, LockstepError, ModelError
from lockstep.lanes.lane_sums import NUMBERS, USED, LaneSums, Reductions, refuse_not_finite
from lockstep.lanes.objects import Buffers, Objects
from lockstep.lanes.rounds import compare_facts
from lockstep.lanes.state_tree import PackedState, prove_equal
from lockstep.lanes.step_reduction import Means
from lockstep.lightning.lane_results import Noted
from lockstep.measure.machine_fingerprint import fingerprint
from lockstep.models.tensors import model_tensors


class StepTable:
    """The lanes of one step: gradients and buffers are summed, loss and logged numbers kept by lane."""

    def __init__(self, sums: LaneSums, buffers: Buffers, lanes: int, device: torch.device) -> None:
        self._sums, self._buffers, self._lanes, self._device = sums, buffers, lanes, device
        self._hows: list[str] = []
        self.means: Means | None = None
        self.table = torch.zeros(0)

    def add(self, lane: int, loss: Tensor, noted: Sequence[Noted]) -> None:
        """Take the lane that was just computed."""
        self._hows = [each.how for each in noted]
        weights = torch.tensor([each.weight for each in noted], dtype=torch.float64)
        numbers = torch.zeros(self._lanes, 2 + 2 * len(noted), dtype=torch.float64, device=self._device)
        # each lane fills a row of its own, and sums with zeros are exact: so the mean is the whole table
        numbers[lane, : 1 + len(noted)] = torch.stack([loss.detach().double(), *(n.value for n in noted)])
        numbers[lane, 1 + len(noted) : -1] = weights.to(self._device)
        numbers[lane, -1] = self._integers()
        self._sums.add(self._hows, numbers)

    def finish(self) -> None:
        """Get the means over all lanes; a collective."""
        self.means = self._sums.finish()
        self.table = self.means.numbers[NUMBERS].cpu() * self._lanes
        if len(set(self.table[:, -1].tolist())) > 1:
            raise LockstepError(
                f"an integer buffer differs between lanes ({', '.join(self._buffers.int_names()[:4])}), so "
                "it has no mean: make it a function of the step, or a float"
            )

    def _integers(self) -> float:
        """A number that stands for the integer buffers; on a GPU only the first step compares them."""
        if self._device.type != "cpu":
            return 0.0
        sha = hashlib.sha256()
        for buffer in self._buffers.ints():
            sha.update(buffer.contiguous().view(-1).view(torch.uint8).numpy().data)
        return float(int.from_bytes(sha.digest()[:6], "little"))  # 48 bits, exact in float64

    @property
    def loss(self) -> Tensor:
        """The mean loss, in float64."""
        return tree_sum(self.table[:, 0]) / self._lanes

    def logged(self) -> Iterator[tuple[str, list[float], list[float]]]:
        """How each number is logged, its values and its weights by lane."""
        for place, how in enumerate(self._hows, 1):
            yield how, self.table[:, place].tolist(), self.table[:, place + len(self._hows)].tolist()


class FitState:
    """The module while `Trainer.fit` runs."""

    def __init__(self, module: pl.LightningModule, device: torch.device, lanes: int, seed: int) -> None:
        self._module, self._device, self._lanes = module, device, lanes
        self._objects = Objects(device, "LaneStrategy")
        self._objects.add(module)
        self._reductions = Reductions(lanes)
        self._grads: list[tuple[Tensor, Tensor]] = []
        facts = {"lockstep": lockstep.__version__, "lanes": lanes, "seed": seed}
        facts |= {"threads": torch.get_num_threads(), **fingerprint(device)}
        self.facts = json.loads(json.dumps(facts))  # plain texts, which torch.version is not

    def take_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Refuse optimizers that need more than one gradient for a step."""
        for optimizer in optimizers:
            self._objects.add(optimizer)

    def send_weights(self, group: Group) -> None:
        """All workers compare what they are, then start from the weights and buffers of worker 0."""
        mine = {**self.facts, "objects": self._objects.describe()}
        answers = [json.loads(text) for text in group.all_gather_bytes(json.dumps(mine).encode())]
        for rank, answer in enumerate(answers):
            compare_facts(answers[0], answer, rank)
        for tensor in shared_tensors(self._module).values():
            group.broadcast(tensor)

    def prove(self, group: Group, where: str) -> None:
        """Raise an error if workers have different weights or buffers; a collective."""
        prove_equal(group, PackedState({}, shared_tensors(self._module)), where)

    def check_saved(self, saved: dict[str, Any], path: str | Path) -> None:
        """Refuse to go on from a checkpoint that would not end with the same bits."""
        for name, mine in self.facts.items():
            if saved.get(name) != mine:
                raise IdentityError(
                    f"{path} was trained with {name}={saved.get(name)}, and here is {name}={mine}: it would "
                    "not end with the same bits; to begin another training from its weights, load them alone"
                )

    @contextmanager
    def step(self, group: Group, keeps_gradients: bool) -> Iterator[StepTable]:
        """The lanes of one step; at its end the means are known. Gradients are kept, or else dropped."""
        every = list(self._module.parameters())
        before = [(p, p.grad if keeps_gradients else None) for p in every]
        self._params = [p for p in every if p.requires_grad]
        for parameter in every:
            parameter.grad = None
        buffers = self._objects.buffers
        sums = LaneSums(group, self._reductions, self._params, buffers, entered=1, checks_ints=False)
        step = StepTable(sums, buffers, self._lanes, self._device)
        try:
            yield step
            step.finish()
        except GroupLost as lost:
            raise GroupLost(
                f"worker {group.rank} of {group.size} lost another worker, which ended or cannot be reached: "
                "see what that one printed; Trainer.fit(ckpt_path=…) goes on from the last checkpoint, with "
                "any number of workers"
            ) from lost
        finally:
            sums.restore_buffers()
            for parameter, grad in before:
                parameter.grad = grad

    def apply(self, step: StepTable, where: str, checks: bool) -> None:
        """Take the means: buffers now, gradients when Lightning has dropped the old ones."""
        means = step.means
        assert means is not None
        used = means.numbers[USED].tolist()
        self._grads = [(p, g) for p, g, share in zip(self._params, means.grads, used, strict=True) if share]
        if checks:
            tensors = [*(grad for _, grad in self._grads), *means.floats]
            refuse_not_finite(where, step.loss.to(self._device), tensors, self._tensor_names)
        self._objects.buffers.set(means.floats, means.ints)

    def give_gradients(self, batches: int) -> None:
        """Set the means as gradients; of several `batches` that are accumulated, add this one's share."""
        for parameter, mean in self._grads:
            share = mean if batches == 1 else mean / batches
            parameter.grad = share if parameter.grad is None else parameter.grad + share
        self._grads = []

    def close(self) -> None:
        """End the reductions."""
        self._reductions.close()

    def _tensor_names(self) -> list[str]:
        names = self._objects.parameters()
        grads = [f"the gradient of {names[p].partition('.')[2]}" for p, _ in self._grads]
        return [*grads, *(f"buffer {n.partition('.')[2]}" for n in self._objects.buffers.float_names())]


def shared_tensors(module: pl.LightningModule) -> dict[str, Tensor]:
    """Parameters and buffers by name, without what metrics collect, which is each worker's own."""
    metrics = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, Metric))
    every = model_tensors(module)
    return {n: t for n, t in every.items() if isinstance(t, Tensor) and not n.startswith(metrics)}


def refuse_features(trainer: pl.Trainer, layer_sync: object) -> None:
    """Refuse what cannot give the same bits, or not yet."""
    module = trainer.lightning_module
    hooks = trainer._data_connector._datahook_selector
    if hooks and is_overridden(name := "on_before_batch_transfer", hooks.get_instance(name)):
        raise ModelError(
            "LaneStrategy: on_before_batch_transfer would get all lanes at once: use "
            "on_after_batch_transfer, which gets one after another"
        )
    if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        raise ModelError(
            f"LaneStrategy: {type(module).__name__} has automatic_optimization=False, so its backward passes "
            "are its own: use automatic optimization, or a loop of your own with lockstep.lanes"
        )
    if layer_sync:
        raise ModelError(
            "LaneStrategy: sync_batchnorm=True computes with samples of all workers: leave it out; batch "
            "norm has the statistics of a lane"
        )
