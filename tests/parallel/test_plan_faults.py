"""Lost workers under a plan: the bits stay, by the memory of the others where it has all, else from disk."""

from pathlib import Path

import pytest
from job import Job, assert_no_step_lost
from small import small_run, train

HERE = Path(__file__).parent
OVERRIDES = ("train.lanes=8", "train.epochs=2", "train.ema=0.9", "train.clip=1.0", "checkpoint.every_steps=7")
IN_MEMORY, FROM_DISK = "have all of the state", "a part of the state is lost"
CASES = [
    (["--plan", "data=2,pipeline=2"], "1", IN_MEMORY),
    (["--plan", "data=2,pipeline=2"], "0", IN_MEMORY),
    (["--plan", "data=4,shard=parameters", "--replicas", "2"], "2", IN_MEMORY),
    (["--plan", "data=4,shard=optimizer,replicas=2"], "0", IN_MEMORY),
    (["--plan", "shard=gradients", "--workers", "3"], "1", FROM_DISK),
    (["--plan", "pipeline=2"], "1", FROM_DISK),
    (["--plan", "data=1,pipeline=2,channel=2"], "3", IN_MEMORY),
    (["--plan", "data=2,channel=2"], "0", "the plan is now data=2,channel=2"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The hashes of the run by one worker."""
    folder = tmp_path_factory.mktemp("alone")
    train(small_run(*OVERRIDES), folder)
    job = Job(folder)
    return job.hashes()


@pytest.mark.gloo
@pytest.mark.parametrize(("flags", "victim", "told"), CASES)
def test_a_lost_worker_costs_no_bit(flags, victim, told, alone, tmp_path):
    with Job(tmp_path, *flags, overrides=OVERRIDES, paced=True) as job:
        job.wait_for_steps(4)
        job.wait_for_workers(victim)
        job.kill(victim)
        job.wait_for(job.generations, "the next generation")
        job.hurry()
        output, _ = job.finish()
    assert told in output, output
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["data=2,pipeline=2", "data=4,shard=optimizer,replicas=2"])
def test_a_step_that_some_have_committed_is_committed_by_all(plan, alone, tmp_path):
    env = {"KILLED": str(tmp_path / "killed")}
    with Job(tmp_path, "--plan", plan, overrides=OVERRIDES, script=HERE / "uneven_commit.py", env=env) as job:
        output, _ = job.finish()
    assert f"{IN_MEMORY}, and go on from step 5" in output, output
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone


@pytest.mark.gloo
@pytest.mark.parametrize("generation", [1, 2])
def test_a_worker_is_lost_while_the_others_form_the_groups_of_a_plan(generation, alone, tmp_path):
    flags = ["--plan", "data=2,pipeline=2", "--or", "data=2,shard=optimizer", "--or", "data=1"]
    script, stuck = HERE / "stuck_in_part.py", tmp_path / "stuck"
    env = {"STUCK": str(stuck), "GENERATION": str(generation)}
    with Job(tmp_path, *flags, "--restarts", "0", overrides=OVERRIDES, script=script, env=env) as job:
        if generation == 2:  # of two workers, whose groups are parts of a part, and a spare
            job.wait_for_steps(3)
            job.kill("3")
        job.wait_for(stuck.exists, "a group of some workers")
        job.kill("0")
        job.hurry()
        job.finish()
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone


@pytest.mark.gloo
def test_those_who_are_left_take_the_next_plan(alone, tmp_path):
    plans = ["--plan", "data=2,pipeline=2", "--or", "data=2,shard=optimizer", "--or", "data=1"]
    with Job(tmp_path, *plans, "--restarts", "0", overrides=OVERRIDES, paced=True) as job:
        job.wait_for_steps(3)
        job.kill("3")
        job.wait_for(lambda: len(job.generations()) == 1, "two workers and a spare, 2")
        job.kill("0")
        job.wait_for(lambda: len(job.generations()) == 2, "the spare in its place")
        job.kill("1")
        job.wait_for(lambda: len(job.generations()) == 3, "one worker")
        job.hurry()
        output, _ = job.finish()
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone
    assert f"the plan is now data=2,shard=optimizer: the workers {IN_MEMORY}" in output, output
    assert f"the plan is now data=2,shard=optimizer: {FROM_DISK}" in output, output


@pytest.mark.gloo
def test_with_data_left_open_as_many_go_on_as_share_lanes(alone, tmp_path):
    flags = ["--plan", "channel=2", "--workers", "4", "--restarts", "0"]
    with Job(tmp_path, *flags, overrides=OVERRIDES, paced=True) as job:
        job.wait_for_steps(3)
        job.kill("1")
        job.wait_for(job.generations, "two workers and a spare, 3")
        job.kill("0")
        job.wait_for(lambda: len(job.generations()) == 2, "the spare in its place")
        job.hurry()
        output, _ = job.finish()
    assert output.count("the plan is now data=1,channel=2") == 2, output
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone


@pytest.mark.gloo
def test_who_is_left_of_a_lane_saves_the_state_and_stops(alone, tmp_path):
    flags = ["--plan", "data=1,channel=2", "--restarts", "0", "--wait", "0.5"]
    with Job(tmp_path, *flags, overrides=OVERRIDES, paced=True) as job:
        job.wait_for_steps(4)
        job.kill("0")
        _, errors = job.finish(143)
    for told in ("the state is saved, then the run stops", "the state is saved: go on"):
        assert told in errors, errors
    with Job(tmp_path, "--resume", str(tmp_path / "run"), overrides=OVERRIDES) as job:
        job.finish()
    assert_no_step_lost(tmp_path / "run")
    assert job.hashes() == alone
