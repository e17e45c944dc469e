"""Fewer workers and a plan for them: those who have no place in it hand over what they have, then wait."""

import signal
from pathlib import Path

import pytest
from job import Job, assert_no_step_lost
from small import small_run, train
from world import free_port

pytestmark = pytest.mark.gloo
OVERRIDES = ("train.lanes=8", "train.epochs=1", "train.ema=0.9", "train.clip=1.0", "checkpoint.every_steps=7")
IN_MEMORY, FROM_DISK = "the workers have all of the state", "a part of the state is lost"
HALVES = ("--plan", "data=2,pipeline=2", "--or", "data=1")
CASES = [
    (HALVES, "3"),
    (HALVES, "0"),
    (("--plan", "data=4,shard=optimizer,replicas=2", "--or", "data=2"), "1"),
    (("--plan", "data=4,shard=optimizer,replicas=2", "--or", "data=1"), "0"),
    (("--plan", "data=4,shard=parameters,replicas=2", "--or", "data=1"), "2"),
    (("--plan", "data=4,pipeline=2,shard=gradients,replicas=2", "--or", "data=2,shard=optimizer"), "5"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The hashes of the run by one worker."""
    folder = tmp_path_factory.mktemp("alone")
    train(small_run(*OVERRIDES), folder)
    return Job(folder).hashes()


@pytest.mark.parametrize(("flags", "victim"), CASES)
def test_those_who_become_spare_hand_over_their_parts(flags, victim, alone, tmp_path):
    with Job(tmp_path, *flags, "--restarts", "0", overrides=OVERRIDES, paced=True) as job:
        job.wait_for_steps(4)
        count = len(job.workers())
        job.kill(victim)
        (found,) = job.wait_for(job.generations, "the next generation")
        assert len(job.workers()) == count - 1, "spares wait"
        job.hurry()
        output, _ = job.finish()
    assert found["step"] >= 4
    assert f"the plan is now {flags[-1]}: {IN_MEMORY}, and go on from step {found['step']}" in output, output
    assert FROM_DISK not in output and f"{count - 1 - found['workers']} spare" in output
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone


def test_spares_take_their_places_again_when_the_lost_one_is_replaced(alone, tmp_path):
    with Job(tmp_path, *HALVES, overrides=OVERRIDES, paced=True) as job:
        job.wait_for_steps(4)
        job.kill("2")
        job.wait_for(lambda: len(job.generations()) == 2, "one worker, then four")
        job.hurry()
        output, _ = job.finish()
    assert [row["workers"] for row in job.generations()] == [1, 4]
    assert output.count(IN_MEMORY) == 2 and FROM_DISK not in output, output
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("victim", "told"), [("0", IN_MEMORY), ("1", IN_MEMORY), ("2", FROM_DISK)])
def test_a_worker_killed_while_parts_move_costs_no_bit(victim, told, when, alone, tmp_path):
    env = {"KILLED": str(tmp_path / "killed"), "VICTIM": victim, "WHEN": when}
    script, flags = Path(__file__).parent / "killed_giver.py", (*HALVES, "--restarts", "0")
    with Job(tmp_path, *flags, overrides=OVERRIDES, script=script, env=env) as job:
        output, _ = job.finish()
    assert (tmp_path / "killed").exists()
    assert told in output, output
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone


def test_a_node_that_leaves_hands_over_its_parts(alone, tmp_path):
    """With the second half of the layers, which nobody else has."""
    flags = ("--rdzv", f"127.0.0.1:{free_port()}", "--nodes", "2", "--workers", "2")
    given = {"overrides": OVERRIDES, "env": {"LOCKSTEP_TOKEN": "a secret of sixteen"}, "paced": True}
    with Job(tmp_path, *HALVES, *flags, **given) as first, Job(tmp_path, *HALVES, *flags, **given) as second:
        first.wait_for_steps(4)
        (node,) = [job for job in (first, second) if "1.0" in job.workers()]
        (other,) = {first, second} - {node}
        node.process.send_signal(signal.SIGTERM)
        node.finish(143)
        other.wait_for(other.generations, "the next generation")
        other.hurry()
        output, _ = other.finish()
    assert f"the plan is now data=1: {IN_MEMORY}" in output, output
    assert_no_step_lost(tmp_path / "run")
    assert other.hashes() == alone


def test_an_error_in_the_next_plan_ends_those_who_would_give(tmp_path):
    flags = ("--plan", "data=2,pipeline=2", "--or", "pipeline=2,cuts=none_such", "--restarts", "0")
    with Job(tmp_path, *flags, overrides=OVERRIDES, paced=True) as job:
        job.wait_for_steps(4)
        job.kill("1")
        _, errors = job.finish(2)
    assert errors.count("the model has no layer 'none_such'") == 1, errors
