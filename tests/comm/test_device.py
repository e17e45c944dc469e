"""Several GPUs on a host: whatever a worker does there it does on its own one, in every thread."""

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S

import lockstep
from lockstep.comm.background import BackgroundThread, run_in_thread
from lockstep.elastic.launcher_link import LauncherLink
from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.spec.generation import Generation
from lockstep.spec.world import World

ROOT = Path(lockstep.__file__).parent
SECOND = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that only take notes: (thread, what it did, on which GPU)."""
    seen, current = [], threading.local()

    def set_device(device):
        current.index = torch.device(device).index
        seen.append((threading.current_thread().name, "chosen", current.index))

    class Nccl:
        Options = type("Options", (), {})

        def __init__(self, store, rank, size, options):
            self.size = size

        def eager_connect_single_device(self, device):
            name = threading.current_thread().name
            seen.append((name, "connected", device.index, getattr(current, "index", 0)))

        def abort(self):
            seen.append((threading.current_thread().name, "aborted", getattr(current, "index", 0)))

        shutdown = abort

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return seen


class Link(LauncherLink):
    """A connection to a launcher that is a dictionary, and two workers that it tells the same generation."""

    values: dict = {}  # noqa: RUF012
    arrived = threading.Condition()

    def __init__(self, world):
        self._world, self._news, self._group = world, threading.Condition(), None
        self._newest = Generation(1, 1, ("0", "1"), (0, 0))
        self._entered, self._over, self._training, self.run = 0, 0, 0, None

    def say(self, op, **fields):
        pass

    def set(self, generation, key, value):
        with self.arrived:
            self.values[key] = value
            self.arrived.notify_all()

    def get(self, generation, key):
        with self.arrived:
            assert self.arrived.wait_for(lambda: key in self.values, PATIENCE_S)
            return self.values[key]


@pytest.mark.gloo
def test_a_group_is_formed_on_the_gpu_of_its_worker(gpus, monkeypatch):
    """In a thread of its own, where GPU 0 is the current one; and so is one that is lost."""
    monkeypatch.setattr("lockstep.elastic.worker_groups._link", Link)
    # a transport takes the sockets that are new in its process for its own: here two share a process
    both_formed = threading.Barrier(2, timeout=PATIENCE_S)

    def work(rank):
        world = World("lockstep", rank, 2, rank, 2, name=str(rank))
        groups = WorkerGroups(world, "auto", torch.device("cuda", rank))
        groups._training = 1  # each is the first of its process
        group = groups.next()
        both_formed.wait()
        group.cut()
        group.abort()
        return group.backend

    both = [run_in_thread(lambda rank=rank: work(rank), None) for rank in (0, 1)]
    assert [found.result(PATIENCE_S) for found in both] == ["nccl", "nccl"]
    assert sorted(row[1:] for row in gpus if row[1] == "connected") == [
        ("connected", 0, 0),
        ("connected", 1, 1),
    ]
    assert {row[2] for row in gpus if row[1] == "aborted"} == {0, 1}


def test_a_thread_is_on_the_gpu_that_its_work_is_for(gpus):
    thread = BackgroundThread("mine", SECOND)
    thread.submit(lambda: None).result(PATIENCE_S)
    BackgroundThread("other", torch.device("cpu")).submit(lambda: None).result(PATIENCE_S)
    assert [row for row in gpus if row[0] == "lockstep-mine"] == [("lockstep-mine", "chosen", 1)]


# What means the current GPU, or GPU 0 in a new thread, unless it is told which; (name, arguments at least).
TOLD = {
    "current_stream": 1, "Stream": 1, "mem_get_info": 1, "get_device_name": 1,
    "get_device_capability": 1, "get_device_properties": 1, "memory_allocated": 1, "default_stream": 1,
}  # fmt: skip
CHOOSES = ROOT / "kernels" / "numerics.py"  # the only one that asks which is current


def calls():
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path, node, ast.unparse(node.func), len(node.args) + len(node.keywords)


def test_no_call_means_the_current_gpu():
    for path, node, name, given in calls():
        where = f"{path}:{node.lineno}: {ast.unparse(node)}"
        last = name.rpartition(".")[2]
        assert not name.endswith("cuda.current_device") or path == CHOOSES, where
        assert given >= TOLD.get(last, 0), where
        assert name != "torch.cuda.manual_seed" and (name != "torch.cuda.synchronize" or given), where
        assert last != "record" or given, f"{where}: of which stream?"
        assert last != "cuda" or "torch" in name, f"{where}: on which GPU?"
        assert not name.endswith("cuda.graph") or {"stream"} <= {k.arg for k in node.keywords}, where
        if name == "torch.device" and isinstance(node.args[0], ast.Constant):
            assert node.args[0].value != "cuda" or given == 2, where
        assert not any(isinstance(k.value, ast.Constant) and k.value.value == "cuda" for k in node.keywords)


# Threads that are not of `comm.background`, and why they need no GPU, or how they get it.
THREADS = {
    ("comm/background.py", "Thread"),  # it is told
    ("elastic/launcher_link.py", "Thread"),  # hear and beat: they cut a group, in a thread that is told
    ("cli/launch.py", "Thread"),
    ("cli/watch/follow.py", "Thread"),  # of a process that tracks a run: it reads a pipe
    ("data/loader.py", "ThreadPoolExecutor"),  # by its initializer
    ("data/decoding/batch_decoder.py", "ThreadPoolExecutor"),  # files only
    ("data/pack/write_pack.py", "ThreadPoolExecutor"),  # files only
    ("kernels/one_pass_update.py", "ThreadPoolExecutor"),  # calls C, on a CPU only
    ("kernels/triton/compile_ahead.py", "ThreadPoolExecutor"),  # Triton compiles for a target, not on a GPU
}


def test_every_other_thread_is_known():
    found = {
        (path.relative_to(ROOT).as_posix(), name.rpartition(".")[2])
        for path, _, name, _ in calls()
        if name.rpartition(".")[2] in ("Thread", "ThreadPoolExecutor")
    }
    assert found <= THREADS


def test_the_process_that_forks_workers_leaves_the_driver_alone():
    """A child of a process that has started CUDA, if only to count GPUs, has none."""
    code = (
        "import sys, torch\n"
        "def refuse(*_, **__): raise AssertionError('CUDA was asked before the fork')\n"
        "for name in ('_cuda_init', '_cuda_getDeviceCount', '_cuda_getDevice'):\n"
        "    setattr(torch._C, name, refuse)\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse\n"
        "import lockstep.cli.listeners\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=PATIENCE_S)
