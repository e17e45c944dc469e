"""Clusters that ship with Lockstep: every one loads, says where its figures are from, and makes sense."""

import pytest

from lockstep.cli.main import run
from lockstep.errors import SpecError
from lockstep.planner.exchange_time import Ring, reduce_s
from lockstep.planner.preset import find_cluster, list_presets, preset_text
from lockstep.spec.cluster_file import write_cluster

PRESETS = list_presets()
GRADIENTS = 100e6


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_its_figures_are_from(name):
    cluster = PRESETS[name]
    assert cluster.name == name and cluster.network and cluster.node.link
    for key in ("worker.gflop_s", "worker.memory_gb_s", "worker.launch_us", "node.link", "network"):
        assert len(cluster.how[key]) > 20, key
    assert cluster.nodes(1000) == -(-1000 // cluster.node.workers)


def test_every_file_is_a_preset():
    from lockstep.planner import preset

    assert {path.stem for path in preset._FOLDER.iterdir()} == set(PRESETS)


def test_rising_generations_are_faster():
    gpus = [PRESETS[name].worker for name in ("4xK80", "8xP100", "4xV100", "8xA100", "8xH100", "8xH200")]
    for rate in (lambda each: each.gflop_s["fp32"], lambda each: each.memory_gb_s):
        assert [rate(each) for each in gpus] == sorted(rate(each) for each in gpus)
    halves = [PRESETS[name].worker.gflop_s["bf16"] for name in ("8xA100", "8xH100")]
    assert halves == sorted(halves)


def test_faster_networks_take_less_time():
    ways = [PRESETS[name] for name in ("cpu-1g", "cpu-10g", "cpu-100g")]
    times = [reduce_s(each, Ring(2 * each.node.workers), GRADIENTS) for each in ways]
    assert times[0] > 4 * times[1] > 6 * times[2]
    for cluster in PRESETS.values():
        near, far = (reduce_s(cluster, Ring(n * cluster.node.workers), GRADIENTS) for n in (1, 2))
        assert 0 < near < far, cluster.name


def test_all_reduce_on_eight_gpus_is_near_the_table_it_was_fitted_to():
    """NCCL on 8 GPUs. The latency was solved from the first row; the others show how far the form holds."""
    for num_bytes, seconds in ((2**19, 24e-6), (2**22, 50e-6), (2**24, 121e-6), (2**27, 561e-6)):
        assert reduce_s(PRESETS["8xH100"], Ring(8), num_bytes) == pytest.approx(seconds, rel=0.2)


def test_a_name_or_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(preset_text("8xH100"))
    assert find_cluster(str(path)) == find_cluster("8xH100")
    path.write_text(write_cluster(find_cluster("8xH100")))
    assert find_cluster(str(path)) == find_cluster("8xH100")
    with pytest.raises(SpecError, match="unknown cluster '8xH10': did you mean '8xH100'"):
        find_cluster("8xH10")
    with pytest.raises(SpecError, match=r"none\.toml: no such file"):
        find_cluster("none.toml")


def test_the_command_lists_and_shows_them(capsys):
    assert run(["probe", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(PRESETS) + 1]] == list(PRESETS)
    assert run(["probe", "--show", "4xV100"]) == 0
    assert capsys.readouterr().out == preset_text("4xV100")
    assert run(["probe", "--show", "9xV100"]) == 2
    assert "unknown preset '9xV100': did you mean '4xV100'" in capsys.readouterr().err
