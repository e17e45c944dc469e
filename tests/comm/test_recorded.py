"""Noted calls: what NCCL would hang on is refused, with the workers, the communicator and the operations."""

import threading
import time
from contextlib import suppress

import pytest
import torch
from world import in_threads

from lockstep.comm.background import run_in_thread
from lockstep.comm.recorded.call_log import CallLog, read_logs
from lockstep.comm.recorded.play_calls import check_calls
from lockstep.comm.recorded.recording_transport import record_group
from lockstep.comm.self_test import OK, OPERATIONS, check_group
from lockstep.errors import GroupLost, LockstepError

pytestmark = pytest.mark.gloo
CPU = torch.device("cpu")
SOON_S = 2.0  # then a group that hangs is cut


def record(folder, work, size=2, device=CPU):
    """Let every worker of a group work; gives their results."""

    def run(group):
        record_group(group, folder, device)
        return work(group)

    return in_threads(size, run)


def record_hanging(folder, work):
    """The same for workers that wait for each other for ever, until they are cut."""

    def run(group):
        threading.Timer(SOON_S, group.cut).start()
        with suppress(GroupLost):
            work(group)

    record(folder, run)


def test_all_operations_are_noted_and_fit(tmp_path):
    assert record(tmp_path, lambda group: check_group(group, CPU), 3) == [dict.fromkeys(OPERATIONS, OK)] * 3
    assert check_calls(tmp_path) > 3 * len(OPERATIONS)
    calls = [event for event in read_logs(tmp_path)[1] if not isinstance(event, int)]
    assert {call.operation for call in calls} == {name.split()[0] for name in OPERATIONS}
    sends = [call for call in calls if call.operation == "send"]
    assert all(call.members == (0, 1, 2) and call.device == "cpu" and call.num_bytes for call in sends)


def test_different_orders_are_refused(tmp_path):
    def work(group):
        group.broadcast(torch.zeros(4), group.rank)
        group.broadcast(torch.zeros(4), 1 - group.rank)

    record_hanging(tmp_path, work)
    with pytest.raises(LockstepError) as error:
        check_calls(tmp_path)
    told = str(error.value)
    assert told.startswith("different calls: worker 0 has broadcast with root worker 0 on 'world' (call 1")
    assert "worker 1 has broadcast with root worker 1 on 'world' (call 1" in told


def test_different_sizes_are_refused(tmp_path):
    for worker in (0, 1):
        note(CallLog(tmp_path, worker), "world", "all_reduce", num_bytes=4 * (worker + 1))
    with pytest.raises(LockstepError, match=r"4 and 8 bytes: worker 0 has all_reduce on 'world' \(call 1"):
        check_calls(tmp_path)


def test_sends_that_cross_are_refused(tmp_path):
    """Both send, and neither receives; gloo waits too."""

    def work(group):
        group.send(torch.zeros(1 << 20), 1 - group.rank)
        group.recv(torch.zeros(1 << 20), 1 - group.rank)

    record_hanging(tmp_path, work)
    with pytest.raises(LockstepError, match=r"NCCL would hang here: worker 0 waits in send to worker 1 .* →"):
        check_calls(tmp_path)


def test_receives_that_cross_are_refused_though_gloo_runs_them(tmp_path):
    """Each worker receives in one thread and sends in another, by one communicator."""

    def work(group):
        coming = run_in_thread(lambda: group.recv(torch.zeros(4), 1 - group.rank), None)
        while not read_logs(tmp_path).get(group.rank):
            time.sleep(0.01)
        group.send(torch.zeros(4), 1 - group.rank)
        coming.result()
        return "done"

    assert record(tmp_path, work) == ["done"] * 2
    with pytest.raises(LockstepError, match=r"recv from worker 1 on 'world'.* → worker 1 waits in recv"):
        check_calls(tmp_path)


def test_a_cycle_over_several_communicators_is_found(tmp_path):
    """Worker 0 waits for 1, 1 for 2, and 2 for 0; each call alone would do."""
    for worker in range(3):
        log, after, before = CallLog(tmp_path, worker), (worker + 1) % 3, (worker - 1) % 3
        for pair in (sorted((worker, after)), sorted((worker, before))):
            log.end(note(log, f"pair {pair}", "barrier", members=pair))
    with pytest.raises(LockstepError) as error:
        check_calls(tmp_path)
    told = str(error.value)
    assert told.count(" → ") == 3 and told.endswith("worker 0, where this began")
    for worker, pair in enumerate(("[0, 1]", "[1, 2]", "[0, 2]")):
        assert f"worker {worker} waits in barrier on 'pair {pair}' (call 1" in told


def test_a_call_that_one_worker_never_makes_is_named(tmp_path):
    note(CallLog(tmp_path, 0), "world", "barrier")
    CallLog(tmp_path, 1)
    with pytest.raises(LockstepError, match=r"worker 0 waits in barrier .* worker 1, which never makes"):
        check_calls(tmp_path)


def test_a_tensor_on_the_wrong_device_is_refused_at_once(tmp_path):
    wanted = r"worker \d: broadcast on 'world' got a tensor on cpu, and that communicator takes .* on meta"
    with pytest.raises(LockstepError, match=wanted):
        record(tmp_path, lambda group: group.broadcast(torch.zeros(4)), device=torch.device("meta"))


def note(log, communicator, operation, num_bytes=0, members=(0, 1)):
    return log.begin(
        {
            "communicator": communicator,
            "members": list(members),
            "operation": operation,
            "other": None,
            "num_bytes": num_bytes,
            "sent": [],
            "received": [],
            "dtype": "uint8",
            "device": "cpu",
        }
    )
