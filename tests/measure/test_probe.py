"""`lockstep probe`: a real one of this machine, and what it makes of numbers."""

import sys

import forked
import pytest
import torch

from lockstep.comm.group import Group
from lockstep.measure.probe import FULL, QUICK, Effort, Machine, probe_machine
from lockstep.measure.probe_codec import SCHEMES
from lockstep.measure.probe_device import time_rounds
from lockstep.measure.probe_exchange import fit_link
from lockstep.measure.probe_workers import worker_counts
from lockstep.planner.preset import find_cluster
from lockstep.spec.cluster import ExchangeTimes
from lockstep.spec.cluster_file import write_cluster

CPU = torch.device("cpu")
COMMAND = [sys.executable, "-W", "error", "-m", "lockstep", "probe"]


@pytest.mark.gloo
def test_a_quick_probe_of_this_machine(tmp_path):
    words = ["--quick", "--device", "cpu", "--workers", "2", "--output", "cluster.toml"]
    done = forked.call([*COMMAND, *words], cwd=tmp_path, launches=True)
    assert done.returncode == 0, done.stderr
    assert "probe: exchanges: reduce among 2 workers" in done.stderr and "2 workers" in done.stdout
    text = (tmp_path / "cluster.toml").read_text()
    cluster = find_cluster(str(tmp_path / "cluster.toml"))
    assert write_cluster(cluster) == text
    assert cluster.node.workers == 2 == len(cluster.worker.slowdown) and cluster.worker.kind == "cpu"
    assert set(cluster.worker.gflop_s) == {"fp32", "bf16"} and cluster.worker.launch_us > 0
    assert {(row.kind, row.workers) for row in cluster.exchange} == {(kind, 2) for kind in KINDS}
    for row in cluster.exchange:
        assert row.mb[0] == 0.004096 and row.mb[-1] == 33.55 and 0 < row.ms[0] < row.ms[-1]
    assert cluster.feed.disk_mb_s > 0 and cluster.feed.decode_img_s > 1
    for key in ("worker.gflop_s.fp32", "worker.memory_gb_s", "worker.slowdown", "exchange", "node.link"):
        assert cluster.how[key], key
    again = forked.call([*COMMAND, *words], cwd=tmp_path)
    assert again.returncode == 2 and again.stderr.count("\n") == 1
    assert "--output cluster.toml exists" in again.stderr
    assert (tmp_path / "cluster.toml").read_text() == text


KINDS = ("reduce", "gather", "swap", "send")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workers", "0"], "--workers 0 must be 1 to"),
        (["--output", "none/cluster.toml"], "there is no such folder"),
        pytest.param(
            ["--device", "cuda"],
            "torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_be_is_refused_before_measuring(tmp_path, words, says):
    done = forked.call([*COMMAND, *words], cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_one_worker_has_no_exchanges(tmp_path):
    told = []
    machine = Machine(CPU, tmp_path, lambda: sum(range(1000)))
    cluster = probe_machine(Group(), machine, Effort(0.1, 0.1, 0.1, 16, 4 << 20, codec_side=128), told.append)
    assert cluster.node.workers == 1 and not cluster.exchange and cluster.node.link is None
    assert cluster.worker.slowdown == (1.0,) and len(told) > 3
    assert [row.scheme for row in cluster.codec] == list(SCHEMES) and cluster.how["codec"]
    assert all(row.lane_ns > 0 and row.mean_ns > 0 and row.commit_ns > 0 for row in cluster.codec)


def test_which_numbers_of_workers_and_sizes_are_tried():
    assert worker_counts(1) == []
    assert worker_counts(2) == [2]
    assert worker_counts(5) == [2, 3, 4, 5]
    assert worker_counts(20) == [2, 3, 4, 8, 16, 20]
    for effort in (QUICK, FULL):
        assert effort.sizes == sorted(set(effort.sizes))
        assert effort.sizes[0] == 4096 and effort.sizes[-1] == 32 << 20


def test_a_link_is_found_again():
    mb = (0.004, 0.064, 1.0, 32.0)
    link, error = fit_link(ExchangeTimes("send", 2, mb, tuple(0.05 + each / 1.25 for each in mb)))
    assert link.latency_us == pytest.approx(50) and link.gb_s == pytest.approx(1.25)
    assert error.value == pytest.approx(0, abs=1e-9)


def test_rounds_are_medians():
    rounds = time_rounds(lambda: None, CPU, 0.0)
    assert len(rounds.seconds) == 5 and min(rounds.seconds) <= rounds.median <= max(rounds.seconds)
    assert rounds.told.startswith("n = 5, ")
