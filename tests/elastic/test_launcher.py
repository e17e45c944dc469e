"""Our launcher with real processes: signals, failures, what is shown, and that nothing is left running."""

import os
import re
import signal
import sys
import time

import forked
import pytest
from job import Job
from patience import PATIENCE_S
from small import OVERRIDES, call, rows, small_run, summary, train, train_command
from world import has_mpi, launched

from lockstep.elastic import job as elastic_job
from lockstep.elastic.launcher import Launcher
from lockstep.elastic.worker_command import script_command

pytestmark = pytest.mark.gloo
LONG = ("train.epochs=400", "data.num_test=10")  # far longer than any test


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_other_workers_go_on_to_the_same_bits(number, code, tmp_path):
    with Job(tmp_path, "--workers", "3", paced=True) as job:
        job.wait_for_steps(2)
        assert set(job.workers()) == {"0", "1", "2"}
        job.process.send_signal(number)
        _, errors = job.finish(code)
    heard, stopped = errors.splitlines()  # one worker speaks for all
    assert heard.startswith(f"lockstep: {number.name}: saving after this step")
    assert stopped.startswith(f"lockstep: stopped by {number.name} after step")
    if number == signal.SIGINT:
        return  # the rest is the same
    again = forked.call(train_command(tmp_path, "--resume", "auto", "--workers", "2"), launches=True)
    assert again.returncode == 0, again.stderr
    alone, _ = train(small_run(), tmp_path / "alone")
    for key in ("weights_sha256", "optimizer_sha256", "loss"):
        assert summary(tmp_path / "run")[key] == alone.summary[key]


def test_a_signal_while_workers_start(tmp_path):
    with Job(tmp_path, "--workers", "2", overrides=LONG, fresh=True) as job:
        job.wait_for(job.nurseries, "the fork server")
        job.process.send_signal(signal.SIGTERM)  # before there is any worker
        job.finish(143)


def test_nobody_reads_what_it_prints(tmp_path):
    with Job(tmp_path, "--workers", "2", fresh=True) as job:
        job.process.stdout.close()
        assert job.process.wait(timeout=PATIENCE_S) == 0
    assert summary(tmp_path / "run")["steps"] == 20


@pytest.mark.parametrize("again", [1, 2])
def test_more_signals_end_it_at_once(again, tmp_path):
    with Job(tmp_path, "--workers", "2", overrides=LONG) as job:
        job.wait_for_steps(1)
        job.kill("1", number=signal.SIGSTOP)  # so the first signal cannot be obeyed at once
        for _ in range(1 + again):
            job.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        job.finish(143)


def test_the_death_of_the_launcher_leaves_no_worker(tmp_path):
    with Job(tmp_path, "--workers", "3", overrides=LONG) as job:
        job.wait_for_steps(1)
        job.workers()
        job.process.kill()
        job.process.wait()
        job.assert_no_orphan()


def test_the_death_of_the_process_that_forks_ends_the_job(tmp_path):
    with Job(tmp_path, "--workers", "2", overrides=LONG) as job:
        job.wait_for_steps(1)
        job.workers()
        os.kill(job.fork_server(), signal.SIGKILL)
        _, errors = job.finish(1)
    said, what = "the process that starts workers has ended", "the same command with --resume auto goes on"
    assert errors == f"lockstep: {said}; {what}\n"


def test_a_frozen_process_that_forks_is_woken(tmp_path):
    with Job(tmp_path, "--workers", "2", paced=True) as job:
        job.wait_for_steps(1)
        os.kill(job.fork_server(), signal.SIGSTOP)
        job.kill("1")
        job.hurry()
        job.finish()


SCRIPT = """
import os, lockstep
from lockstep.spec.run_file import from_table, merge, parse_overrides, to_table
from lockstep.spec.world import read_world
run = from_table(merge(to_table(lockstep.recipe("shapes")), parse_overrides({overrides})))
world = read_world(os.environ)
rank = world.rank if world else 0
launch = lockstep.Launch({launch}name="run", device="cpu")
{before}
result = lockstep.train(run, launch=launch, on_event=lambda event: None)
line = "finished {{workers}} {{weights_sha256}}\\n".format(**result.summary)
open("main", "a").write("x" * lockstep.is_main())
print(line, end="")  # in one write: several workers may share this stdout
"""


def script(folder, before="", launch="workers=3, ", overrides=OVERRIDES):
    path = folder / "my_script.py"
    path.write_text(SCRIPT.format(before=before, launch=launch, overrides=list(overrides)))
    return path


def test_a_script_of_the_user_prints_once_and_trains_to_the_same_bits(tmp_path):
    done = forked.call([sys.executable, "-W", "error", str(script(tmp_path))], cwd=tmp_path, launches=True)
    assert done.returncode == 0, done.stderr
    alone, _ = train(small_run(), tmp_path / "alone")
    assert done.stdout.split() == ["finished", "3", alone.summary["weights_sha256"]]


def test_the_same_script_under_torchrun(tmp_path):
    path = script(tmp_path, launch="")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    done = forked.call(run, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second and re.fullmatch("finished 2 [0-9a-f]{64}", first)
    assert (tmp_path / "main").read_text() == "x"


def test_a_worker_that_raises_is_shown_with_its_rank(tmp_path):
    path = script(tmp_path, 'if rank == 2: raise ValueError("broken here")')
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 0 and done.stdout.startswith("finished 2 "), "two workers are enough"
    assert "[worker 2] ValueError: broken here" in done.stderr
    assert not [line for line in done.stderr.splitlines() if not line.startswith("[worker 2]")]
    assert "fork server" not in done.stderr and "runpy" not in done.stderr


def test_all_workers_raise(tmp_path):
    path = script(tmp_path, 'if world: raise ValueError("broken here")')
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 1 and done.stderr.count("ValueError: broken here") == 3


def test_what_a_script_does_after_training_decides_too(tmp_path):
    path = script(tmp_path, launch="workers=2, ")
    path.write_text(path.read_text() + "\nraise SystemExit(7)")
    assert forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True).returncode == 7


def test_a_script_that_catches_a_signal_has_its_own_exit_code(tmp_path):
    """As with one worker; and the launcher lets it go on as long as it likes."""
    path = script(tmp_path, "from lockstep.elastic import launcher; launcher._GRACE_S = 0.5", "workers=2, ")
    text = path.read_text().replace("lambda event: None", "stop").replace("result =", STOP + "result =")
    text = text.replace("result =", "try:\n    result =").partition("line =")[0]
    path.write_text(f"{text}except lockstep.errors.Interrupted as error:\n{CAUGHT}")
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 5, (done.stdout, done.stderr)
    assert done.stdout == "caught 143\n" and "saving after this step" in done.stderr


STOP = """
import signal, time
def stop(event):
    if getattr(event, "step", 0) == 3: os.kill(os.getpid(), signal.SIGTERM)
"""
CAUGHT = """    time.sleep(2)
    print("caught", error.exit_code)
    raise SystemExit(5)
"""


@pytest.mark.parametrize(("workers", "code"), [("workers=2, ", 1), ("", 1)], ids=["two", "one"])
def test_what_listens_ends_the_run_by_its_exception(workers, code, tmp_path):
    path = script(tmp_path, launch=workers)
    listen = 'def listen(event):\n    if getattr(event, "step", 0) == 3: raise ValueError("enough")\n'
    path.write_text(
        path.read_text().replace("lambda event: None", "listen").replace("result =", listen + "result =")
    )
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=bool(workers))
    assert done.returncode == code and done.stderr.count("ValueError: enough") == 1, done.stderr
    assert "finished" not in done.stdout and len(rows(tmp_path / "runs" / "run", "step")) == 3


@pytest.mark.parametrize(
    ("flags", "keys", "code", "message"),
    [
        ([], ["data.num_train=10"], 2, "the 10 training images"),
        ([], ["model.name=resnet9000"], 2, "resnet9000"),
        ([], ["optimizer.lr=1e30"], 1, "finite"),
        (["--backend", "nccl"], [], 2, "--backend nccl needs a GPU"),
        (["--device", "cuda"], [], 2, "--device cuda: torch sees no GPU"),
        (["--resume", "nowhere"], [], 2, "no run 'nowhere'"),
        (["--backend", "carrier-pigeon"], [], 2, "carrier-pigeon"),
    ],
    ids=["data", "model", "nan", "nccl", "device", "resume", "backend"],
)
def test_an_error_of_all_workers_is_said_once(flags, keys, code, message, tmp_path):
    command = train_command(tmp_path, "--workers", "2", *flags, overrides=tuple(keys))
    done = forked.call(command, launches=True)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(message) == 1, done.stderr
    assert done.stderr.count("lockstep: ") + done.stderr.count("error: argument") == 1, done.stderr


def test_a_script_trains_twice(tmp_path):
    path = script(tmp_path, launch="workers=2, ")
    again = "again = lockstep.train(run, launch=launch, on_event=lambda event: None)\n"
    path.write_text(path.read_text() + again + 'print(again.summary["weights_sha256"], again.directory.name)')
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 0, done.stderr
    _, _, first, second, name = done.stdout.split()
    assert first == second and name == "run-2"


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            "import dataclasses\nrun = dataclasses.replace(run, seed=rank // 2)",
            "worker 2 on .* has seed=1, worker 0 on .* has 0",
        ),
        (
            "import torch\nif rank == 1: torch.__version__ = '2.99.0'",
            "worker 1 on .* has numerics.torch=2.99.0",
        ),
        (
            "if rank == 1: run = lockstep.Run(data=lockstep.Data('mnist', dir='nowhere'))",
            "worker 1 on .*: .*nowhere",
        ),
    ],
    ids=["seed", "torch", "data missing"],
)
def test_workers_that_would_differ_are_refused_by_name(before, message, tmp_path):
    done = forked.call([sys.executable, str(script(tmp_path, before))], cwd=tmp_path, launches=True)
    assert done.returncode in (1, 2), done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "runs").exists(), "a directory was made before the workers agreed"


def test_another_content_of_the_data_is_refused(tmp_path):
    before = (
        "import torch\n"
        "images = torch.arange(64 * 256).remainder(251).to(torch.uint8).view(64, 1, 16, 16)\n"
        "if rank == 1: images = images + 1\n"
        "data = [(image.float() / 255, int(n % 4)) for n, image in enumerate(images)]\n"
        "import functools; lockstep.train = functools.partial(lockstep.train, data=(data, data))"
    )
    done = forked.call([sys.executable, str(script(tmp_path, before))], cwd=tmp_path, launches=True)
    assert done.returncode in (1, 2), done.stderr
    assert "worker 1 on" in done.stderr and "manifest." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers 0 must be a whole number from 1"),
        (["--workers", "-3"], "--workers -3 must be a whole number from 1"),
        (["--workers", "many"], "--workers many must be a whole number from 1, or auto"),
        (["--workers", "5"], "5 workers are more than train.lanes=4"),
        (["--workers", "2", "--backend", "mpi"], "--backend mpi needs mpirun"),
        (["--workers", "2", "--bucket-mb", "0"], "--bucket-mb 0 must be above 0"),
        (["--workers", "2", "--bucket-mb", "nan"], "--bucket-mb nan must be above 0"),
    ],
)
def test_bad_flags_are_refused_before_any_worker_starts(arguments, message, tmp_path):
    done = call(train_command(tmp_path, *arguments))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_code_without_a_file_cannot_be_started_again(tmp_path):
    code = "import lockstep; lockstep.train(lockstep.recipe('shapes'), launch=lockstep.Launch(workers=2))"
    done = call([sys.executable, "-c", code], cwd=tmp_path)
    assert "save it in one" in done.stderr


def test_what_a_script_does_before_training_is_no_trouble(tmp_path):
    """It cuts its arguments, goes elsewhere, and lies beside a file with the name of a standard module."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "random.py").write_text("raise SystemExit('imported')")
    before = "import sys; assert sys.argv[1:] == ['--x', '1']; sys.argv = sys.argv[:1]; os.chdir('elsewhere')"
    path = script(tmp_path, before, launch="workers=2, ")
    done = call([sys.executable, path.name, "--x", "1"], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("finished 2 "), done.stderr
    assert (tmp_path / "elsewhere" / "runs" / "run" / "summary.json").is_file()


def test_a_worker_lost_at_the_end_of_the_first_of_two_trainings(tmp_path):
    before = "import signal, time\ntimes = []"
    path = script(tmp_path, before, launch="workers=2, ")
    die = (
        "def event(event):\n"
        "    if getattr(event, 'step', 0) == 19 and not times and not os.path.exists('once'):\n"
        "        open('once', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    text = path.read_text().replace("lambda event: None", "event").replace("result =", die + "result =")
    again = "times.append(1); again = lockstep.train(run, launch=launch, on_event=event)\ntime.sleep(1)\n"
    path.write_text(text.replace("print(", "time.sleep(1)\nprint(") + again + "print(again.directory.name)")
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == "run-2", (done.stdout, done.stderr)


def test_a_script_does_what_it_does_once_once_though_worker_0_dies(tmp_path):
    before = (
        "import signal\n"
        "def once(name):\n"
        "    if lockstep.is_main(): open(name, 'a').write('x')\n"
        "once('before')\n"
        "def event(event):\n"
        "    if getattr(event, 'step', 0) == 3 and world.name == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = script(tmp_path, before, launch="workers=2, ")
    path.write_text(path.read_text().replace("lambda event: None", "event") + "once('after')\n")
    done = forked.call([sys.executable, str(path)], cwd=tmp_path, launches=True)
    assert done.returncode == 0 and done.stdout.startswith("finished "), done.stderr
    assert done.stdout.count("finished") == 1
    assert [(tmp_path / name).read_text() for name in ("before", "after")] == ["x", "x"]


def test_auto_is_one_worker_a_core_and_at_most_the_lanes(tmp_path):
    keys = ("train.epochs=1", "train.lanes=2")
    done = forked.call(train_command(tmp_path, "--workers", "auto", overrides=keys), launches=True)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["workers"] == min(2, len(os.sched_getaffinity(0)))


@pytest.mark.mpi
@pytest.mark.skipif(not has_mpi("openmpi"), reason="Open MPI is not installed beside this Python")
def test_a_log_of_open_mpi_has_plain_lines(tmp_path):
    """Its workers have terminals, which nobody looks at."""
    command, env = launched("openmpi", 2, train_command(tmp_path))
    done = call(command, env=env)
    assert done.returncode == 0 and "\x1b" not in done.stdout and "epoch 2/2" in done.stdout, done.stdout


@pytest.mark.mpi
@pytest.mark.skipif(not has_mpi("mpich"), reason="MPICH is not installed beside this Python")
def test_a_worker_that_raises_under_mpi_is_heard_and_ends_the_job(tmp_path):
    before = (
        "import torch\n"
        "class Broken(torch.nn.Linear):\n"
        "    seen = 0\n"
        "    def forward(self, x):\n"
        "        self.seen += 1\n"
        '        if rank == 1 and self.seen > 9: raise ValueError("broken here")\n'
        "        return super().forward(x.flatten(1))\n"
        "import functools; lockstep.train = functools.partial(lockstep.train, model=Broken(256, 10))"
    )
    path = script(tmp_path, before, launch='backend="mpi", ')
    command, env = launched("mpich", 2, [sys.executable, str(path)])
    done = call(command, env=env, cwd=tmp_path)
    assert done.returncode != 0 and "ValueError: broken here" in done.stderr


def test_more_requests_than_a_socket_holds(tmp_path, monkeypatch):
    """While the fork server still imports, as many workers are asked for as there are."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_import.py").write_text("import time; time.sleep(1.0)\n")
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    job = elastic_job.Job(200, 200, preload="slow_import", is_elastic=False)
    assert Launcher(job, lambda worker, line: None, script_command([str(script)])).run() == 0


SLOW_TO_SAY = """
import os, sys, time
from lockstep.elastic.launcher_link import LauncherLink
from lockstep.spec.world import read_world

world = read_world(os.environ)
if world.rank == 0:
    time.sleep(1.5)  # it has still to say what all workers found
LauncherLink(world).say("verdict", code=2, rank=world.rank, training=1)
if world.rank == 0:
    sys.exit("lockstep: what all workers found")
"""


def test_worker_0_has_time_to_say_a_shared_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SLOW_TO_SAY)
    said = []
    job = elastic_job.Job(2, 2, preload="lockstep.elastic.launcher_link", is_elastic=False)
    launcher = Launcher(job, lambda worker, line: said.append(line), script_command([str(script)]))
    assert launcher.run() == 1 and said == ["lockstep: what all workers found"]
