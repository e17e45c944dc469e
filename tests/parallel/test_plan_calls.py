"""Plans run over a transport that notes each worker's calls: NCCL would not hang on them."""

import os
import sys
from pathlib import Path

import forked
import pytest
from small import summary, train_command

from lockstep.comm.recorded.call_log import read_logs
from lockstep.comm.recorded.play_calls import check_calls

WORKER = Path(__file__).parent / "recorded_train.py"
OVERRIDES = ("train.lanes=8", "train.epochs=1", "data.num_train=96", "train.clip=1.0", "train.ema=0.9")
PLANS = {
    "pipeline=2": 2,
    "pipeline=3,schedule=gpipe": 3,
    "data=2": 2,
    "data=3,shard=gradients": 3,
    "data=2,pipeline=2,shard=parameters": 4,
    "data=2,channel=2": 4,
    "data=3,layers=hidden*": 3,
}


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", PLANS)
def test_nccl_would_not_hang_on_a_plan(plan, tmp_path):
    more = ("train.slices=4",) if "layers" in plan else ()
    train = train_command(tmp_path, "--plan", plan, overrides=(*OVERRIDES, *more))
    command = [sys.executable, str(WORKER), *train[train.index("train") :]]
    done = forked.call(command, {**os.environ, "RECORDS": str(tmp_path / "calls")}, launches=True)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["workers"] == PLANS[plan]
    (folder,) = (tmp_path / "calls").iterdir()
    assert check_calls(folder) > 0
    for log in read_logs(folder).values():
        operations = {event.operation for event in log if not isinstance(event, int)}
        assert {"send", "recv"} <= operations or "pipeline" not in plan
        assert "swap" in operations or "data" not in plan
