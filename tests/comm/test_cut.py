"""A group that is cut while a message is half way, which gloo then forgets: who waits must leave."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import Forked

from lockstep.comm.rendezvous import Place, form
from lockstep.errors import GroupLost

pytestmark = pytest.mark.gloo
MESSAGE = torch.ones(1 << 25)  # 128 MB: some ten milliseconds, more than the sockets hold


def meet(path, rank):
    place = Place(rank, 2, "gloo", "127.0.0.1", torch.device("cpu"), on_one_host=False)
    store = dist.FileStore(path, 2)
    store.set_timeout(timedelta(seconds=60))  # one that never comes is a failure, not half an hour's wait
    group = form(store, place)
    group.barrier()
    return group


@pytest.mark.parametrize("sends", [True, False])
def test_who_waits_for_half_a_message_leaves_a_group_that_is_cut(sends, tmp_path):
    path = str(tmp_path / "store")
    with Forked([sys.executable, __file__, path, str(int(sends))]) as other:
        group, cut_at = meet(path, 0), []

        def freeze_and_cut():
            time.sleep(0.01)
            other.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            cut_at.append(time.monotonic())
            group.cut()

        threading.Thread(target=freeze_and_cut).start()
        try:
            with pytest.raises(GroupLost, match="lost contact"):
                while True:
                    (group.send if sends else group.recv)(MESSAGE, 1)
            assert time.monotonic() - cut_at[0] < 2
            group.abort()
        finally:
            other.kill()


if __name__ == "__main__":
    theirs = meet(sys.argv[1], 1)
    while os.getppid() != 1:
        (theirs.recv if sys.argv[2] == "1" else theirs.send)(MESSAGE, 0)
