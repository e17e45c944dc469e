"""`lockstep simulate`: a table, JSON and a picture; bad words in one line."""

import json

import pytest
from PIL import Image

from lockstep.cli.main import run

CLUSTER = """\
name = "4xGPU"
[worker]
kind = "gpu"
device = "a GPU"
memory_gb = 80.0
memory_gb_s = 3000.0
gflop_s = { fp32 = 60000.0 }
[node]
workers = 4
[node.link]
latency_us = 5.0
gb_s = 300.0
"""
NETWORK = "[network]\nlatency_us = 8.0\ngb_s = 100.0\n"


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER + NETWORK)
    return [
        "simulate",
        "--cluster",
        str(path),
        "--nodes",
        "100",
        "--step-ms",
        "250",
        "--runs",
        "2",
        "--days",
        "9",
    ]


def test_a_table_for_each_rate_of_failure(words, capsys):
    assert run([*words, "--node-mtbf-hours", "500,2000"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "100 nodes of 4xGPU, steps of 250 ms; 30 s a checkpoint, 14.2 s a restart, 1.46 s a rec"
    )
    assert "a node fails every 500 hours, the run meets a failure every 5 hours" in shown
    assert shown.count("by Young and Daly") == 2 and "10 min" in shown


def test_json_and_a_picture(words, capsys, tmp_path):
    picture = tmp_path / "goodput.png"
    words += ["--interval-min", "5,60", "--picture", str(picture), "--json", "--recover-s", "60"]
    assert run(words) == 0
    (found,) = json.loads(capsys.readouterr().out)["rates"]
    assert found["run"]["workers_a_node"] == 4 and found["run"]["recover_s"] == 60
    assert [row["interval_s"] for row in found["goodput"]] == [300, 3600]
    assert all(0.8 < row["restart"] < row["recovery"] < 1 for row in found["goodput"][1:])
    with Image.open(picture) as drawn:
        assert drawn.size == (1080, 600)
    assert run(words) == 2 and "there is such a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--nodes", "1"], "nodes=1: nobody survives"),
        (["--step-ms", "-5"], "step_s=-0.005 must be above 0"),
        (["--interval-min", "0,5"], "--interval-min 0 must be above 0"),
        (["--node-mtbf-hours", "100,-1"], "node_mtbf_hours=-1.0 must be above 0"),
        (["--lanes", "128"], "lanes=128 for 400 workers"),
        (["--cluster", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(words, capsys, more, said):
    assert run([*words, *more]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_nodes_need_a_network(words, tmp_path, capsys):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    assert run(words) == 2 and "has no [network]" in capsys.readouterr().err


def test_the_step_of_a_recipe_is_simulated(words, capsys, tmp_path):
    trace = tmp_path / "step.json"
    words = [word for word in words if word not in ("--step-ms", "250")]
    words += ["shapes", "-o", "train.lanes=512", "-o", "train.batch=2048", "--spread", "0.1", "--steps", "20"]
    assert run([*words, "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("data=400, 400 workers: ") and "in closed form" in shown
    assert {row["pid"] for row in json.loads(trace.read_text())["traceEvents"]} == set(range(8))
    assert run([*words, "--plan", "channel=3"]) == 2 and "workers = data × channel" in capsys.readouterr().err
    assert run([*words, "-o", "train.lanes=256"]) == 2 and "train.lanes=512" in capsys.readouterr().err


def test_a_step_is_given_once(words, capsys):
    for more in (["shapes"], ["--spread", "0.1"], ["--plan", "channel=2"], ["--trace", "step.json"]):
        assert run([*words, *more]) == 2 and "leave one of them out" in capsys.readouterr().err
    assert run([word for word in words if word not in ("--step-ms", "250")]) == 2
    assert "Give --step-ms, or a recipe" in capsys.readouterr().err
