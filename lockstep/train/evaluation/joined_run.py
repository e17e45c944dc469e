"""A trained run that several workers use together: joins them, and deals the run by the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from lockstep.comm.everywhere import everywhere
from lockstep.comm.group import Group
from lockstep.comm.group_source import GroupSource
from lockstep.data import Split
from lockstep.errors import LockstepError
from lockstep.kernels.loss import Loss
from lockstep.kernels.numerics import prepare_device
from lockstep.runs.trained_run import Trained
from lockstep.spec.launch import Launch
from lockstep.spec.plan import Plan
from lockstep.spec.world import World
from lockstep.train.evaluation.dealt_run import DealtRun
from lockstep.train.evaluation.evaluate import find_loss
from lockstep.train.evaluation.host_evaluate import Evaluation
from lockstep.train.evaluation.metric import Metrics

T = TypeVar("T")


@dataclass(frozen=True)
class JoinedRun:
    """A run, opened without its weights, and the workers that use it; every call is a collective."""

    trained: Trained
    group: Group
    plan: Plan

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one to print."""
        return self.group.rank == 0

    def agree(self, work: Callable[[], T]) -> T:
        """Do what may fail on some workers only; then all of them fail."""
        return everywhere(self.group, work)

    def evaluate(self, split: Split, loss: Loss | None = None, metrics: Metrics | None = None) -> Evaluation:
        """Loss, accuracy and metrics on a split."""
        train = self.trained.run.train
        batch, found = train.batch // train.lanes, find_loss(self.trained, loss)
        with closing(DealtRun(self.trained, self.plan, self.group, batch=batch, loss=found)) as dealt:
            return dealt.evaluate(split, metrics)

    def predict(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """The probabilities of the classes for every picture."""
        with closing(DealtRun(self.trained, self.plan, self.group, batch=1)) as dealt:
            return [dealt.predict(picture[None])[0] for picture in pictures]


@contextmanager
def join_run(
    launch: Launch, find_groups: Callable[..., GroupSource], opens: Callable[[World], Trained]
) -> Iterator[JoinedRun]:
    """Join the other workers and open a run without its weights."""
    world = launch.world
    assert world
    device = prepare_device(launch.device, 1, world.local_rank)
    groups = find_groups(world, launch.backend, device)
    group = groups.next()
    try:
        yield JoinedRun(everywhere(group, lambda: opens(world)), group, launch.plan)
    except BaseException as error:
        if isinstance(error, LockstepError):
            error.rank = group.rank
        if getattr(error, "everywhere", False):
            groups.tell_end(getattr(error, "exit_code", 1), group.rank)
            groups.leave(group)
        else:
            group.abort()
        raise
    groups.leave(group)
    groups.tell_end(0, group.rank)
