"""Two nodes: two network namespaces of this machine, joined by a cable of their own."""

import os
import subprocess
import sys
import time

import pytest
from namespaces import can_make_namespaces, inside, two_nodes
from patience import PATIENCE_S
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
    with two_nodes() as (names, _):
        nodes = [
            subprocess.Popen(
                inside(name, [*run, f"--node-rank={number}", *command[command.index("-m") :]]),
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, name in enumerate(names)
        ]
        errors = [node.communicate(timeout=PATIENCE_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    alone, _ = train(small_run(), tmp_path / "alone")
    found = summary(tmp_path / "run")
    assert found["workers"] == 4 and found["weights_sha256"] == alone.summary["weights_sha256"]


def test_a_host_that_cannot_be_reached_is_named_within_30_s(tmp_path):
    """Nobody is at the first address, and no route leads to the second; both are tried at once."""
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29532"}
    with two_nodes() as (names, _):
        start = time.monotonic()
        tries = {
            address: subprocess.Popen(
                inside(names[1], train_command(tmp_path)),
                env={**os.environ, **world, "MASTER_ADDR": address},
                stderr=subprocess.PIPE,
                text=True,
            )
            for address in ("10.77.0.9", "10.88.0.1")
        }
        errors = {address: process.communicate(timeout=PATIENCE_S)[1] for address, process in tries.items()}
    assert time.monotonic() - start < 30
    for address, process in tries.items():
        assert process.returncode == 1 and address in errors[address], errors
        assert len(errors[address].splitlines()) == 1
    assert not list(tmp_path.iterdir())
