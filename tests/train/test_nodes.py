"""Two nodes: two network namespaces of this machine, joined by a cable of their own."""

import os
import sys
import time
from contextlib import ExitStack

import forked
import pytest
from namespaces import can_make_namespaces, forked_inside, two_nodes
from small import small_run, summary, train, train_command

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, iproute2 and network namespaces"),
]


def test_two_nodes_of_two_workers_train_to_the_same_bits(tmp_path):
    command = train_command(tmp_path)
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    run += ["--master-addr=10.77.0.1", "--master-port=29531"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with two_nodes() as (names, _), ExitStack() as stack:
        words = [[*run, f"--node-rank={number}", *command[command.index("-m") :]] for number in range(2)]
        nodes = [
            stack.enter_context(forked.Forked(forked_inside(name, own), env))
            for name, own in zip(names, words, strict=True)
        ]
        done = [node.finish() for node in nodes]
    assert [node.returncode for node in done] == [0, 0], [node.stderr for node in done]
    alone, _ = train(small_run(), tmp_path / "alone")
    found = summary(tmp_path / "run")
    assert found["workers"] == 4 and found["weights_sha256"] == alone.summary["weights_sha256"]


def test_a_host_that_cannot_be_reached_is_named_within_30_s(tmp_path):
    """Nobody is at the first address, and no route leads to the second; both are tried at once.

    The processes are forked, since the time that a busy machine takes to start Python is not ours.
    """
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29532"}
    forked.call([sys.executable, "-c", ""])  # starts the server that forks
    with two_nodes() as (names, _), ExitStack() as stack:
        start, command = time.monotonic(), forked_inside(names[1], train_command(tmp_path))
        tries = {
            address: stack.enter_context(
                forked.Forked(command, {**os.environ, **world, "MASTER_ADDR": address})
            )
            for address in ("10.77.0.9", "10.88.0.1")
        }
        done = {address: process.finish() for address, process in tries.items()}
        took = time.monotonic() - start
    for address, ended in done.items():
        assert ended.returncode == 1 and address in ended.stderr, done
        assert len(ended.stderr.splitlines()) == 1
    assert took < 30, done
    assert not list(tmp_path.iterdir())
