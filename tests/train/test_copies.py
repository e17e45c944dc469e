"""A worker is lost with what its lanes remembered: all go back to the last copy of it, to the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from job import Job, assert_no_step_lost
from small import small_run, summary
from torch import nn
from world import in_threads

from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.compress.unfinished_feedback import UnfinishedFeedback
from lockstep.comm.group import Group
from lockstep.errors import LockstepError, SpecError
from lockstep.runs.held_state import HeldParts, HeldState, hold
from lockstep.runs.journal import Journal
from lockstep.runs.kept_state import KeptState, choose_keepers
from lockstep.runs.state_parts import StateParts, StatePiece
from lockstep.runs.train_state import TrainState
from lockstep.spec import Launch, Optimizer
from lockstep.spec.rule.compression import read_compression
from lockstep.train.handshake import begin_parts
from lockstep.train.setup import Given, set_up

RUN = ("train.lanes=8", "train.epochs=1", "train.ema=0.9", "train.clip=1.0", "checkpoint.every_steps=4")
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "feedback_sha256", "loss", "identity")
COPY, DISK = (
    "a part of the state is lost, and all go back {} to the copy of step {}",
    "the checkpoint of step",
)
LANES = [f"feedback.lane{lane:05}.weight" for lane in range(4)]
ALL = "the workers have all of the state, and go on from step"


def hurt(folder, kind, workers, **variables):
    """Train while workers are killed; gives what was printed."""
    flags = ["--workers", str(workers), "--copy-every", "3", "--restarts", "0"]
    keys, script = (*RUN, f"train.compress={kind}"), Path(__file__).parent / "killed_copier.py"
    with Job(folder, *flags, overrides=keys, script=script, env=variables) as job:
        output, _ = job.finish()
    assert_no_step_lost(folder / "run")
    return output


def same_bits(folder, expected):
    found = summary(folder / "run")
    return all(found[key] == expected[key] for key in HASHES)


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "workers"), [("int8", 2), ("top:0.05", 3), ("rank:2", 4)])
def test_all_go_back_to_the_copy_and_no_file_is_read(kind, workers, by_one_worker, tmp_path):
    output = hurt(tmp_path, kind, workers, WHEN="before", AT="5", NAMES="1")
    assert COPY.format("2 steps", 3) in output and DISK not in output, output
    told = summary(tmp_path / "run")["generations"][-1]
    assert (told["step"], told["undone"], told["workers"]) == (3, 2, workers - 1)
    assert "went on from step 3" in output and ", 2 steps to do again" in output, output
    assert "every 3 steps (--copy-every) the workers copy their state" in output, output
    assert same_bits(tmp_path, by_one_worker(*RUN, f"train.compress={kind}"))


@pytest.mark.gloo
def test_a_kill_while_all_copy_leaves_the_copy_before(by_one_worker, tmp_path):
    output = hurt(tmp_path, "top:0.05", 3, WHEN="within", AT="6", NAMES="0")
    assert COPY.format("3 steps", 3) in output and DISK not in output, output
    assert same_bits(tmp_path, by_one_worker(*RUN, "train.compress=top:0.05"))


@pytest.mark.gloo
def test_with_its_neighbour_the_copy_is_lost_and_the_disk_serves(by_one_worker, tmp_path):
    output = hurt(tmp_path, "top:0.05", 4, WHEN="before", AT="7", NAMES="1 2", READS="yes")
    assert f"all go back 3 steps to {DISK} 4" in output, output
    assert same_bits(tmp_path, by_one_worker(*RUN, "train.compress=top:0.05"))


@pytest.mark.gloo
def test_a_worker_that_joins_costs_no_step(by_one_worker, tmp_path):
    overrides = (*RUN, "train.epochs=2", "train.compress=top:0.05")
    with Job(tmp_path, "--workers", "3", overrides=overrides, paced=True) as job:
        job.wait_for_steps(5)
        job.kill("1")
        lost, joined = job.wait_for(lambda: len(g := job.generations()) == 2 and g, "the one in its place")
        job.hurry()
        output, _ = job.finish()
    assert "to the copy of step 0" in output and lost["undone"] >= 5, output
    assert f"{ALL} {joined['step']}" in output and joined["undone"] == 0, output
    assert_no_step_lost(tmp_path / "run")
    assert same_bits(tmp_path, by_one_worker(*overrides))


def test_a_copy_is_kept_on_another_node_if_there_is_one():
    assert choose_keepers([0, 0, 0]) == [1, 2, 0]
    assert choose_keepers([0, 0, 1, 1]) == [2, 3, 0, 1]
    assert choose_keepers([0, 0, 1, 1, 2, 2]) == [2, 3, 4, 5, 0, 1]
    assert choose_keepers([0, 0, 0, 1]) == [3, 3, 3, 0]


def test_who_is_left_of_the_other_node_has_all_of_it():
    """Rank 3 is alone on its node, and keeps what the three of the other one have."""

    def work(group):
        model = nn.Linear(128, 128)
        params = dict(model.named_parameters())
        feedback = Feedback(read_compression("int8"), params, 4, group)
        state = TrainState.begin(model, Optimizer("momentum"), 0.9, StateParts(group), None, feedback)
        for piece in state.pieces():
            piece.tensor.detach().fill_(float(len(piece.name) + piece.start + group.rank * (piece.start > 0)))
        for lane, tensors in feedback.lanes.items():
            tensors["weight"].fill_(lane)
        state.step = 7
        state.parts.shapes(state.pieces())
        kept = KeptState(7)
        kept.begin(group, [0, 0, 0, 1], state)
        state.step = 8  # what comes after is no part of the copy
        feedback.lanes[group.rank]["weight"].fill_(-1)
        return kept, [(piece.name, piece.start, piece.tensor) for piece in feedback.pieces()]

    *_, (last, _) = found = in_threads(4, work)
    whole = last.find(Group())
    assert whole.step == 7 and all(each.find(Group()).step == -1 for each, _ in found[:3])
    targets = [StatePiece(name, (), 0, torch.empty(128 * 128)) for name in LANES]
    means = [StatePiece(name, (), start, tensor.clone()) for _, own in found for name, start, tensor in own]
    means = [piece for piece in means if "mean" in piece.name]
    expected = [piece.tensor.clone() for piece in means]
    for piece in means:
        piece.tensor.zero_()
    whole.move([*targets, *means])
    assert [piece.tensor.unique().tolist() for piece in targets] == [[0.0], [1.0], [2.0], [3.0]]
    assert len(means) == 4
    assert all(torch.equal(piece.tensor, mean) for piece, mean in zip(means, expected, strict=True))


def test_a_step_that_was_caught_up_with_is_remembered_whole():
    """Rank 0 has committed it; rank 1 lost the others before, and what its lane remembers comes elsewhere."""

    def work(group):
        model = nn.Linear(128, 128)
        feedback = Feedback(read_compression("int8"), dict(model.named_parameters()), 2, group)
        state = TrainState.begin(model, Optimizer("sgd"), 0.0, StateParts(group), None, feedback)
        state.parts.shapes(state.pieces())

        def commit(norm):
            unfinished = UnfinishedFeedback()
            unfinished.beside(0, feedback.lanes[group.rank], ["weight"])["weight"].fill_(5.0)
            unfinished.commit(None)

        if group.rank:
            state.finish = commit
        else:
            commit(None)
            state.step, state.norm = 1, torch.ones(())
        found = HeldParts(group, hold(state))
        targets = [StatePiece(name, (), 0, torch.zeros(128 * 128)) for name in LANES[:2]]
        found.move(targets)
        return found.step, [piece.tensor.unique().tolist() for piece in targets]

    assert in_threads(2, work) == [(1, [[5.0], [5.0]])] * 2


def held(step, *names):
    """What one worker holds of a state of two tensors."""
    pieces = [StatePiece(name, (2,), 0, torch.full((2,), float(step))) for name in names]
    return HeldState({"step": step}, pieces, {"a": (2,), "b": (2,)}, None, None)


def test_the_latest_step_of_which_nothing_is_missing():
    found = HeldParts(Group(), held(5, "a"), [held(2, "a", "b"), held(4, "a"), held(4, "b")])
    assert (found.step, found.latest, found.live, found.is_lost) == (4, 5, None, False)
    own = [StatePiece(name, (2,), 0, torch.zeros(2)) for name in "ab"]
    found.move(own)
    assert all(piece.tensor.tolist() == [4.0, 4.0] for piece in own)
    assert HeldParts(Group(), held(5, "a"), [held(5, "b")]).live.cursor == {"step": 5}


def test_rows_of_steps_that_are_done_again_are_forgotten():
    run = small_run("train.compress=int8")
    setup = set_up(run, torch.device("cpu"), Given())
    journal = Journal(lambda event: None, setup.about(), trace=False)
    journal.noted += [("metrics.jsonl", {"kind": "step", "step": step}) for step in (1, 2, 3, 4, 5)]
    state = TrainState.begin(setup.model, run.optimizer, 0.0)
    for state.step, undone, rows in ((3, 2, [1, 2, 3]), (2, 3, [1, 2])):
        journal.start(state, 10, 2, takes_over=True)
        assert journal.undone == undone and [row["step"] for _, row in journal.noted] == rows
    journal.regroup(None, 2, 2)
    assert journal.noted.pop()[1]["undone"] == 3 and journal.undone == 0


def test_a_module_that_was_trained_cannot_begin_again(tmp_path):
    run = small_run("train.compress=int8")
    setup = set_up(run, torch.device("cpu"), Given())
    kept = KeptState(0)
    kept._live = held(5, "a")
    lost = [kept.find(Group()) for _ in range(2)][-1]  # also if a worker is lost while the others go back
    own = replace(setup, identity={**setup.identity, "source.model.class": "Own"})
    with pytest.raises(LockstepError, match="no checkpoint was saved"):
        begin_parts(Group(), own, lambda: None, lost, None, None)


def test_bad_input_is_one_line():
    with pytest.raises(SpecError, match=r"--copy-every -1 must be a whole number from 0"):
        Launch(copy_every=-1)
    assert "--copy-every 7" in Launch(copy_every=7).resume_command(Path("run"))
