"""Data sets of the user's, read by processes: the same samples, clear errors, and none left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from patience import PATIENCE_S
from small import small_run
from torch import Tensor

import lockstep
from lockstep.data.map_style import from_map_style
from lockstep.data.own.data_processes import data_processes
from lockstep.errors import DataError, SpecError

SCRIPT = """
import sys, time, torch, lockstep
from torch import nn

class Photos(torch.utils.data.Dataset):
    targets = [i % 4 for i in range(128)]
    def __len__(self):
        return 128
    def __getitem__(self, i):
        time.sleep({delay})
        return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(i)), i % 4

torch.manual_seed(0)
data = lockstep.Data(augment=("flip",))
run = lockstep.Run(data=data, train=lockstep.Train(epochs={epochs}, batch=16, lanes=4))
where = {{"runs_dir": sys.argv[1], "name": "own", "device": "cpu"}}
launch = lockstep.Launch(**where, workers={workers}, data_processes={processes})
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
print(lockstep.train(run, net, (Photos(), Photos()), launch=launch).summary["weights_sha256"])
"""


class Own:
    """Samples with targets of any structure, some of them bad."""

    def __init__(self, bad: dict[int, Any] | None = None) -> None:
        self.bad = bad or {}

    def __len__(self) -> int:
        return 200  # of which 64 are read first, not the one of number 41

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        if i in self.bad:
            return self.bad[i]()
        return torch.full((2, 3, 3), float(i)), {"mask": torch.full((3, 3), i), "size": (i, 0.5 * i)}


def read(data: Any, count: int, ids: Tensor, any_target: bool = True) -> tuple[Tensor, Any]:
    with data_processes(data, count, lambda: None):
        store = from_map_style(data, any_target=any_target)
        store.train.read(ids[:1])
        return store.train.read(ids)


def test_samples_of_any_structure_are_the_same_in_one_and_in_three_processes() -> None:
    data, ids = (Own(), Own()), torch.randperm(200)
    images, targets = read(data, 0, ids)
    for count in (1, 3):
        found, others = read(data, count, ids)
        assert torch.equal(found, images) and found.data_ptr() % 64 == 0
        assert targets.keys() == others.keys() and torch.equal(targets["mask"], others["mask"])
        assert all(map(torch.equal, targets["size"], others["size"]))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (lambda: 1 // 0, r"train\[41\]: ZeroDivisionError: integer division or modulo by zero$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"train\[41\]: its data process ended \(SIGKILL\)"),
        (lambda: os._exit(3), r"train\[41\]: its data process ended \(exit code 3\)"),
        (
            lambda: (torch.zeros(2, 4, 4), {}),
            r"train\[41\]: image is float32 2x4x4, the first is float32 2x3x3",
        ),
        (lambda: (torch.zeros(2, 3, 3), {}), r"train\[41\]: its target is \{\}, the first one is"),
        (lambda: 5, r"train\[41\]: a sample must be \(image, target\)"),
        (lambda: (torch.full((2, 3, 3), torch.nan), Own()[0][1]), r"train\[41\]: the image has values"),
    ],
    ids=["raises", "killed", "exits", "image", "target", "none", "nan"],
)
def test_a_bad_sample_is_named_by_its_index(bad: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        read((Own({41: bad}), Own()), 2, torch.arange(200))


def test_processes_are_for_data_sets_in_python(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="data_processes=2 are for a data set in Python"):
        lockstep.train(small_run(), launch=lockstep.Launch(runs_dir=tmp_path, device="cpu", data_processes=2))
    with pytest.raises(SpecError, match="data_processes -1 must be a whole number from 0"):
        lockstep.Launch(data_processes=-1)


def start(tmp_path: Path, **values: Any) -> Forked:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT.format(**values))
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    return Forked(command, launches=values["workers"] > 1)


def family(pid: int) -> set[int]:
    """Data processes below a process."""
    found, todo = set(), [pid]
    while todo:
        each = todo.pop()
        try:
            children = Path(f"/proc/{each}/task/{each}/children").read_text().split()
            if Path(f"/proc/{each}/comm").read_text().strip() == "lockstep data":
                found.add(each)
        except OSError:
            continue
        todo += map(int, children)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(holds: Any, seconds: float = PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(holds())


def test_trained_bits_depend_on_neither_processes_nor_workers(tmp_path: Path) -> None:
    told = []
    for workers, processes in ((1, 0), (1, 1), (2, 3)):
        with start(tmp_path, workers=workers, processes=processes, delay=0, epochs=1) as job:
            told.append("".join(job.communicate()))
    hashes = {found for text in told for found in re.findall(r"^[0-9a-f]{64}$", text, re.MULTILINE)}
    assert len(hashes) == 1 and all(found in text for text in told for found in hashes), told


def test_a_sample_that_never_comes_can_be_interrupted(tmp_path: Path) -> None:
    with start(tmp_path, workers=1, processes=1, delay=1000.0, epochs=1) as job:
        assert wait_until(lambda: len(family(job.pid)) == 1)
        processes = family(job.pid)
        time.sleep(2)  # until it waits for a batch; on a busy machine that takes longer
        for _ in range(20):  # the first one would save after the step, the next that finds it waiting ends it
            os.kill(job.pid, signal.SIGINT)
            time.sleep(1)
            if job.poll() is not None:
                break
        job.communicate(timeout=30)
        assert wait_until(lambda: not any(map(lives, processes)), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_none_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path, workers=1, processes=2, delay=0.01, epochs=50) as job:
        run = tmp_path / "runs" / "own" / "metrics.jsonl"
        assert wait_until(lambda: run.exists() and run.stat().st_size > 0)
        processes = family(job.pid)
        assert len(processes) == 2
        for pid in (job.pid, *processes) if number == signal.SIGINT else (job.pid,):
            os.kill(pid, number)  # a terminal interrupts all of them
        told = "".join(job.communicate())
        assert wait_until(lambda: not any(map(lives, processes)), 5)
    if number == signal.SIGINT:
        assert "the state is saved" in told, told
