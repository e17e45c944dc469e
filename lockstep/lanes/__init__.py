"""The same bits in a training loop of one's own, by any number of workers; `lockstep.train` stands on it too.

from lockstep import lanes

session = lanes.join(lanes=8, seed=0)               # torchrun, mpirun, srun, `lockstep launch`, or alone
model, optimizer = session.setup(model, optimizer)
for epoch in session.epochs(10):
    for batch in session.loader(dataset, batch=256):
        with session.step() as step:
            for images, labels in batch:            # this worker's lanes of the batch
                step.backward(loss_of(model(images), labels))
"""

from __future__ import annotations

from lockstep.comm.tree_reduce import TreeReduce
from lockstep.kernels import random
from lockstep.kernels.dropout import dropout
from lockstep.lanes.check import check
from lockstep.lanes.join import join
from lockstep.lanes.lane_sampler import LaneSampler
from lockstep.lanes.saved_state import verify
from lockstep.lanes.session import Session

__all__ = ["LaneSampler", "Session", "TreeReduce", "check", "dropout", "join", "random", "verify"]
