"""A cluster's file: reads back equal, and nonsense is refused in one line that names the key."""

import tomllib
from dataclasses import replace

import pytest

from lockstep.errors import SpecError
from lockstep.spec.cluster import (
    Cluster,
    ExchangeTimes,
    FeedRate,
    LinkRate,
    NetworkRate,
    NodeShape,
    WorkerSpeed,
)
from lockstep.spec.cluster_file import cluster_from_table, read_cluster, write_cluster

WORKER = WorkerSpeed("cpu", 'a "core"', 4.0, 12.5, {"fp32": 36.0, "bf16": 1.5}, 2.0, slowdown=(1.0, 1.25))
WHOLE = Cluster(
    "two nodes",
    WORKER,
    NodeShape(2, LinkRate(60.0, 1.5), price_hour=0.4),
    NetworkRate(30.0, 1.17, nodes_a_switch=16, oversubscription=2.0),
    FeedRate(200.0, 450.0, 2),
    (ExchangeTimes("reduce", 2, (0.004, 1.0), (0.1, 1.5)), ExchangeTimes("send", 2, (1.0,), (0.7,))),
    {"worker.gflop_s": "guessed"},
)
GOOD = write_cluster(WHOLE)


def test_a_cluster_reads_back_equal():
    assert cluster_from_table(tomllib.loads(GOOD)) == WHOLE
    small = Cluster("one", replace(WORKER, slowdown=(1.0,)), NodeShape(1))
    assert cluster_from_table(tomllib.loads(write_cluster(small))) == small


def test_more_workers_are_more_nodes():
    assert [WHOLE.nodes(workers) for workers in (1, 2, 3, 7)] == [1, 1, 2, 4]
    assert [WHOLE.slowdown(workers) for workers in (1, 2, 8)] == [1.0, 1.25, 1.25]
    with pytest.raises(SpecError, match=r"3 workers are 2 nodes of 2, .* has no \[network\]"):
        replace(WHOLE, network=None).nodes(3)


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ("memory_gb_s = 12.5", "memory_gb_s = -12.5", "worker.memory_gb_s=-12.5 must be above 0"),
        ("memory_gb_s = 12.5", "memory_gb_s = 0", "worker.memory_gb_s=0 must be above 0"),
        ("fp32 = 36.0", "fp32 = -1", "worker.gflop_s.fp32=-1 must be above 0"),
        ("fp32 = 36.0", 'fp32 = "fast"', "worker.gflop_s.fp32='fast' must be a finite number"),
        ("fp32 = 36.0", "fp32 = 1e300", "worker.gflop_s.fp32=1e+300 must be from 1e-12 to 1e+12"),
        ("gb_s = 1.5", "gb_s = 1e-300", "node.link.gb_s=1e-300 must be from 1e-12 to 1e+12"),
        ("mb = [0.004, 1.0]\nms = [0.1, 1.5]", "mb = [0.0]\nms = [1.0]", "has no size above 0"),
        ("fp32 = 36.0, ", "", "worker.gflop_s has no fp32"),
        ("gb_s = 1.5", "gb_s = nan", "node.link.gb_s=nan must be a finite number"),
        ("latency_us = 60.0", "latency_us = -1", "node.link.latency_us=-1 must be 0 or more"),
        ("latency_us = 60.0\n", "", "node.link.latency_us is missing"),
        ("[node.link]\nlatency_us = 60.0\ngb_s = 1.5\n", "", "[node.link] is missing"),
        ("workers = 2\nprice", "workers = 0\nprice", "node.workers=0 must be above 0"),
        ("workers = 2\nprice", "workers = 2.5\nprice", "node.workers=2.5 must be a whole number"),
        ("price_hour", "price_hours", "did you mean 'node.price_hour'?"),
        ('kind = "cpu"', 'kind = "tpu"', "worker.kind: unknown kind 'tpu'"),
        ('kind = "cpu"', "kind = 3", "worker.kind=3 must be text"),
        ('kind = "reduce"', 'kind = "sum"', "exchange.kind: unknown kind 'sum'"),
        ("memory_gb = 4.0", 'memory_gb = "4 GB"', "worker.memory_gb='4 GB' must be a finite number"),
        ("memory_gb = 4.0", "memory_gb = true", "worker.memory_gb=True must be a finite number"),
        ("slowdown = [1.0, 1.25]", "slowdown = [0.5]", "worker.slowdown=[0.5]: no part may be below 1"),
        ("slowdown = [1.0, 1.25]", "slowdown = 1.0", "worker.slowdown=1.0 must be a list of numbers"),
        ("slowdown = [1.0, 1.25]", "slowdown = []", "worker.slowdown=[] must be a list of numbers"),
        ("ms = [0.1, 1.5]", "ms = [0.1]", "exchange: mb must rise"),
        ("mb = [0.004, 1.0]", "mb = [1.0, 0.004]", "exchange: mb must rise"),
        (
            "oversubscription = 2.0",
            "oversubscription = 0.5",
            "network.oversubscription=0.5 must be 1",
        ),
        ('name = "two nodes"\n', "", "name is missing"),
        ("[worker]", "[worker.x]", "unknown key 'worker.x'"),
        ("[feed]", "[[feed]]", "feed must be a table"),
        ('"worker.gflop_s" = "guessed"', '"worker.gflop_s" = 3', "how.worker.gflop_s=3 must be text"),
        ("gflop_s = { fp32 = 36.0, bf16 = 1.5 }", "gflop_s = 36.0", "worker.gflop_s=36.0 must be a table"),
        ('name = "two nodes"', "name = two nodes", "not a TOML file"),
    ],
)
def test_nonsense_is_refused_in_a_line(tmp_path, line, instead, says):
    assert line in GOOD
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace(line, instead, 1))
    with pytest.raises(SpecError) as error:
        read_cluster(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and says in text and "\n" not in text, text


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read|no such"):
        read_cluster(tmp_path / "none.toml")
