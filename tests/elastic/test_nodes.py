"""Several launchers of one job: on one host by loopback, and as two nodes with a cable that is cut."""

import asyncio
import os
import re
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from job import Job, assert_no_step_lost
from namespaces import can_make_namespaces, inside, ip, two_nodes
from small import call, small_run, summary, train, train_command
from world import free_port

from lockstep.elastic.coordinator_link import Link
from lockstep.elastic.job import Job as ElasticJob
from lockstep.errors import LockstepError

pytestmark = pytest.mark.gloo
TOKEN = {"LOCKSTEP_TOKEN": "a secret of sixteen"}
KEYS = ("train.epochs=10", "checkpoint.every_steps=50", "data.num_test=10")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    found, _ = train(small_run(*KEYS), tmp_path_factory.mktemp("calm"))
    return found.summary


def assert_same(found, expected):
    for key in ("weights_sha256", "optimizer_sha256", "loss", "accuracy", "steps", "identity"):
        assert found[key] == expected[key], key


def node(folder, port, *arguments, workers="2", keys=KEYS):
    return train_command(
        folder, "--workers", workers, "--rdzv", f"127.0.0.1:{port}", *arguments, overrides=keys
    )


def paced(folder, *arguments, **options):
    """A job with such a launcher."""
    return Job(folder, command=node(folder, *arguments, **options), env=TOKEN, paced=True)


@pytest.fixture
def port():
    return free_port()


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_second_launcher_joins_and_leaves_when_asked(expected, port, tmp_path):
    with paced(tmp_path, port, "--nodes", "1:2") as first:
        first.wait_for_steps(3)
        with paced(tmp_path / "other", port, "--nodes", "1:2") as second:
            first.wait_for(lambda: any(row["workers"] == 4 for row in first.generations()), "four workers")
            before = first.steps()
            second.workers()
            second.process.send_signal(signal.SIGTERM)
            _, errors = second.finish(143)
            assert "stopped by SIGTERM: this node left the job" in errors, errors
        first.wait_for_steps(before + 3)
        first.hurry()
        output, _ = first.finish()
    assert_same(summary(first.run), expected)
    assert_no_step_lost(first.run)
    assert "worker 1.0 on" in output and "left: " in output and "killed" not in output
    assert not (tmp_path / "other").exists(), "worker 0 alone writes"


def test_a_spare_takes_over_a_lane_and_stops_with_the_others(port, tmp_path):
    with paced(tmp_path, port, "--nodes", "1:2", "--restarts", "0", workers="4") as first:
        first.wait_for_steps(1)
        with paced(tmp_path / "other", port, workers="1") as second:
            second.wait_for_workers("1.0")
            first.kill("2")
            first.wait_for(lambda: "1.0 on" in str(first.generations()), "the spare")
            assert [row["workers"] for row in first.generations()][-1] == 4
            first.process.send_signal(signal.SIGTERM)
            _, errors = first.finish(143)
            assert "the state is saved" in errors
            second.finish(143)
    saved = max(int(path.stem[5:]) for path in (first.run / "checkpoints").glob("*.json"))
    assert first.steps() == saved, "nobody trained on after the state was saved"


def test_a_worker_of_another_node_goes_on_with_the_directory(expected, port, tmp_path):
    """Whatever folder its launcher was started in, and though the path was given relative to the first's."""
    folders = [tmp_path / "one", tmp_path / "other" / "place"]
    jobs = []
    for folder in folders:
        folder.mkdir(parents=True)
        command = node(Path("runs"), port, "--nodes", "2", "--restarts", "0", workers="1")
        jobs.append(Job(tmp_path, command=command, env=TOKEN, cwd=folder, paced=True))
    first, second = jobs
    first.run = second.run = folders[0] / "runs" / "run"
    with first:
        first.wait_for(lambda: is_listening(port), "the store")
        with second:
            first.wait_for_steps(3)
            first.kill("0")
            second.wait_for(lambda: "worker 0 on" in str(second.generations()), "the other to take over")
            first.hurry()
            second.hurry()
            output, _ = second.finish()
        _, errors = first.finish()
    assert "no worker is left" not in errors, "its workers are lost, but not the job"
    assert f"weights_sha256 {expected['weights_sha256']}" in output
    assert_same(summary(first.run), expected)
    assert_no_step_lost(first.run)
    assert not (folders[1] / "runs").exists()


def test_a_launcher_is_killed_and_comes_back(expected, port, tmp_path):
    with paced(tmp_path, port, "--nodes", "2:2") as first:
        first.wait_for(lambda: is_listening(port), "the store")
        for _ in range(2):
            count = len(first.generations())
            with paced(tmp_path, port, "--nodes", "2:2") as second:
                first.wait_for(lambda: first.steps() and len(second.workers()) == 2, "a start")
                first.wait_for(
                    lambda: not count or len(first.generations()) > count,  # noqa: B023
                    "the second to join",
                )
                count = len(first.generations())
                second.process.kill()
                second.process.wait()
                second.assert_no_orphan()
            first.wait_for(lambda: len(first.generations()) > count, "its loss")  # noqa: B023
        first.hurry()
        first.finish()
    assert_same(summary(first.run), expected)
    assert_no_step_lost(first.run)


def test_the_launcher_that_holds_the_store_dies(expected, port, tmp_path):
    with paced(tmp_path, port, "--nodes", "2") as first:
        first.wait_for(lambda: is_listening(port), "the store")
        with paced(tmp_path, port, "--nodes", "2") as second:
            first.wait_for_steps(3)
            first.workers(), second.workers()
            first.process.kill()
            first.process.wait()
            first.assert_no_orphan()
            second.wait_for(lambda: not second.workers(), "its workers to end")
            second.process.send_signal(signal.SIGTERM)
            second.finish(143)
    again = train_command(tmp_path, "--resume", "auto", "--workers", "2", overrides=KEYS)
    done = forked.call(again, launches=True)
    assert done.returncode == 0, done.stderr
    assert_same(summary(first.run), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LOCKSTEP_TOKEN": "another secret of sixteen"}, "the token does not match"),
        ({"LOCKSTEP_TOKEN": "short"}, "needs a secret of 16 characters or more in LOCKSTEP_TOKEN"),
    ],
)
def test_a_launcher_without_the_token_is_refused(change, message, port, tmp_path):
    with paced(tmp_path, port, "--nodes", "1:2") as first:
        first.wait_for_steps(1)
        done = call(node(tmp_path / "other", port), env={**os.environ, **change})
        assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
        assert first.process.poll() is None and not first.generations()


def answers_signals(pid):
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_launchers_that_wait_for_others_can_be_stopped(port, tmp_path):
    with ExitStack() as stack:
        jobs = []
        for name in ("first", "second", "third"):
            command = node(tmp_path / name, port, "--nodes", "4", workers="1")
            jobs.append(stack.enter_context(Job(tmp_path / name, command=command, env=TOKEN)))
            jobs[0].wait_for(lambda: is_listening(port))
        for job in jobs:
            job.wait_for(lambda job=job: all(map(answers_signals, job.workers().values() or [1])))
        first, second, third = jobs
        second.process.send_signal(signal.SIGTERM)
        assert "this node left the job" in second.finish(143)[1]
        first.process.send_signal(signal.SIGTERM)
        _, errors = first.finish(143)
        assert "stopped by SIGTERM before its workers began" in errors and "--resume" not in errors
        assert "the job ended with exit code 143" in third.finish(143)[1]


def test_a_worker_of_another_run_is_refused_and_the_job_does_not_notice(expected, port, tmp_path):
    with paced(tmp_path, port, "--nodes", "1:2") as first:
        first.wait_for_steps(1)
        other = node(tmp_path / "other", port, workers="1", keys=(*KEYS, "seed=7"))
        done = forked.call(other, env={**os.environ, **TOKEN}, launches=True)
        assert done.returncode == 2 and "has seed=7, the job has 0" in done.stderr, done.stderr
        first.hurry()
        first.finish()
    assert_same(summary(first.run), expected)
    assert len(summary(first.run)["generations"]) == 1


def test_a_host_may_be_named_later_than_its_launcher_starts(monkeypatch):
    """As where a batch system makes the names of its nodes while they start."""
    look_up, said, asked = socket.getaddrinfo, [], []

    def know_later(host, *arguments, **options):
        asked.append(host)
        if host == "no-such-host.invalid" or len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up("127.0.0.1", *arguments, **options)

    async def open_and_close(host):
        wanted = ElasticJob(1, 2, rdzv=(host, free_port()), nodes=(1, 2), token="a secret of sixteen")
        link = Link(wanted, said.append, said.append)
        try:
            await link.open()
            assert link.coordinator and not await link.enter()
        finally:
            await link.close()

    monkeypatch.setattr(socket, "getaddrinfo", know_later)
    asyncio.run(open_and_close("pod-0"))
    assert len(asked) > 2 and "Name or service not known; trying for 30 s" in said[0], said
    monkeypatch.setattr("lockstep.elastic.coordinator_link._SEARCH_S", 0.1)
    with pytest.raises(LockstepError, match=r"no-such-host.*: no host of this name is known") as failed:
        asyncio.run(open_and_close("no-such-host.invalid"))
    assert failed.value.exit_code == 1  # a name may be known later: Kubernetes starts such a pod again


def test_an_address_of_another_host_is_not_bound_by_any_python(monkeypatch):
    """Python 3.11.8 and later raise without a number if no address of a name can be bound."""

    async def refuse(*args, **kwargs):
        raise OSError("could not bind on any address out of [('10.77.0.1', 29400)]")

    async def listen():
        link = Link(
            ElasticJob(1, 2, rdzv=("127.0.0.1", 29400), nodes=(1, 2), token="a secret of sixteen"),
            print,
            print,
        )
        return await link._listen(SimpleNamespace(meet=None), "127.0.0.1", 29400)

    monkeypatch.setattr(asyncio, "start_server", refuse)
    assert asyncio.run(listen()) is None


@pytest.mark.skipif(not can_make_namespaces(), reason="needs root, iproute2 and network namespaces")
def test_the_cable_is_cut_and_healed(expected, tmp_path):
    """The side without the store stops and writes nothing; healed, it joins again."""
    with two_nodes() as (names, ends):
        flags = ["--workers", "2", "--restarts", "100", "--rdzv", "10.77.0.1:29541", "--nodes", "1:2"]
        sides = [
            Job(folder, *flags, overrides=KEYS, env=TOKEN, inside=tuple(inside(name, [])), paced=True)
            for name, folder in zip(names, (tmp_path, tmp_path / "other"), strict=True)
        ]
        with sides[0] as first:
            first.wait_for_steps(1)
            with sides[1] as second:
                first.wait_for(
                    lambda: any(row["workers"] == 4 for row in first.generations()), "four workers"
                )
                ip("-n", names[0], "link", "set", ends[0], "down")
                first.wait_for(
                    lambda: any("no heartbeat" in str(row["changes"]) for row in first.generations()),
                    "the cut",
                )
                second.wait_for(lambda: not second.workers(), "the cut off side to stop")
                count = len(first.generations())
                ip("-n", names[0], "link", "set", ends[0], "up")
                first.wait_for(lambda: len(first.generations()) > count, "the healed side to join")
                first.hurry()
                first.finish()
                second.finish()
    assert_same(summary(first.run), expected)
    assert_no_step_lost(first.run)
    assert not (tmp_path / "other").exists(), "the side without the store writes nothing"


def test_a_lost_node_leaves_what_its_lanes_remembered_on_the_other(port, tmp_path):
    keys = ("train.epochs=10", "train.compress=int8", "data.num_test=10")
    expected = train(small_run(*keys), tmp_path / "calm")[0].summary
    with paced(tmp_path, port, "--nodes", "1:2", "--restarts", "0", keys=keys) as first:
        first.wait_for_steps(1)  # else the second may be there from the beginning
        with paced(tmp_path, port, "--nodes", "1:2", keys=keys) as second:
            first.wait_for(lambda: "1.1 on" in str(first.generations()), "four workers")
            second.process.kill()
            first.wait_for(lambda: first.generations()[-1]["workers"] == 2, "the loss of two")
            first.hurry()
            output, _ = first.finish()
    assert "to the copy of step" in output and "checkpoint of step" not in output, output
    assert_same(summary(first.run), expected)
    assert summary(first.run)["feedback_sha256"] == expected["feedback_sha256"]
    assert_no_step_lost(first.run)
