"""The control: the same model on the same batches by plain DistributedDataParallel, as people write it.

control.py W ... prints, for each number W of workers, the SHA-256 of the weights after three steps. It
depends on W. The workers are forked once torch is imported, and meet in a file, so that no port is needed.
They are ended from here once the first has the weights: gloo has been seen to fail while it shuts down.
"""

import multiprocessing
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch._inductor.config  # the replica imports it, which takes longer than all else; here once for all
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.data import open_store
from lockstep.models import build
from lockstep.models.tensors import model_tensors, tensors_sha256

BATCH, STEPS = 32, 3
LIMIT_S = 40.0  # gloo has been seen to wait without end; nothing else takes so long


def work(rank, size, place, found):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size, timeout=limit)
    store = open_store("shapes", None, {"size": 16, "num_train": 330, "num_test": 70})
    torch.manual_seed(0)
    model = build("lenet5", in_channels=store.shape[0], num_classes=len(store.classes), image_size=(16, 16))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(store.train), generator=torch.Generator().manual_seed(0))
    for step in range(STEPS):
        ids = order[step * BATCH : (step + 1) * BATCH][rank::size]
        images, labels = store.train.read(ids)
        loss = torch.nn.functional.cross_entropy(replica(images.float() / 255 - 0.5), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        found.send(tensors_sha256(model_tensors(model)))
    time.sleep(2 * LIMIT_S)


def main():
    processes = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, sys.argv[1:]):
            turns = (run(processes, size, Path(folder, f"{size}-{turn}")) for turn in range(3))
            print(size, next(filter(None, turns), None) or sys.exit(f"{size} workers gave no weights"))


def run(processes, size, place):
    """What the weights of so many workers hash to; None if a worker fails or they are not there in time."""
    here, there = processes.Pipe(duplex=False)
    group = [processes.Process(target=work, args=(rank, size, place, there)) for rank in range(size)]
    for worker in group:
        worker.start()
    wait([here, *(worker.sentinel for worker in group)], LIMIT_S)
    found = here.recv() if here.poll() else None
    for worker in group:
        worker.kill()
        worker.join()
    return found


if __name__ == "__main__":
    main()
