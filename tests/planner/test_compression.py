"""Steps with compressed gradients, by numbers that one can add up by hand; and what is advised."""

import json
from dataclasses import replace

import pytest
from layer_chain import LAYER_S, chain, cluster, network, run_of

from lockstep.cli.main import run as command
from lockstep.errors import SpecError
from lockstep.planner.compress.advice import with_compression
from lockstep.planner.compress.codec_time import find_codec
from lockstep.planner.cost import predict
from lockstep.planner.deal_work import deal_work
from lockstep.planner.explain import explain
from lockstep.planner.memory import worker_memory
from lockstep.planner.remembered import as_profiled
from lockstep.planner.search import find_changed, find_plans, judge
from lockstep.planner.simulation.step_events import simulate_step
from lockstep.spec.cluster import CodecTime, NodeShape
from lockstep.spec.cluster_file import cluster_from_table, write_cluster
from lockstep.spec.plan import Plan, read_plan
from lockstep.spec.profile import WeightShape, read_profile, write_profile
from lockstep.spec.rule.compression import BLOCK, read_compression
from lockstep.spec.run_file import read_toml

BLOCKS = -(-1_000_000 // BLOCK)  # of a layer
VALUES = 8 * BLOCKS * BLOCK
INT8 = CodecTime("int8", lane_ns=2.0, mean_ns=3.0, commit_ns=1.0)
SPAN_S = 8 * 2 * LAYER_S  # of a lane's backward pass


def nodes(gb_s=0.1, codec=(INT8,), **more):
    """Workers alone on their nodes."""
    found = cluster(network=network(gb_s=gb_s), **more)
    return replace(found, node=NodeShape(1), codec=codec)


def work_of(run, where, workers):
    return deal_work(run, chain(lanes=run.train.lanes), where, Plan(data=workers))


def test_blocks_travel_in_two_rounds_and_codecs_take_a_core():
    """Four workers of a lane each: a quarter of the packed blocks to each other, and back."""
    run = run_of(lanes=4, compress="int8")
    work = work_of(run, nodes(), 4)
    found = predict(work)
    sums = VALUES * 1e-9 * (4 / 4 * 1.0 + 2.0 / 4 + 1.0)  # parts unpacked, the mean packed, all unpacked
    link = 2 * 3 / 4 * VALUES / BLOCK * (BLOCK + 4) / 0.1e9
    assert found.codec_s == pytest.approx(VALUES * 2e-9)
    assert found.exchange_s == pytest.approx(link + sums, rel=5e-3)  # 245 blocks are not dealt quite evenly
    assert found.update_s == pytest.approx(VALUES * 1e-9)
    assert found.sent_bytes == pytest.approx(link * 0.1e9, rel=5e-3)
    assert sums < found.exposed_s < found.exchange_s
    assert found.total_s == pytest.approx(sum(found.parts().values()))
    assert simulate_step(work).mean_s == pytest.approx(found.total_s)


def test_on_one_host_nothing_is_hidden():
    where = replace(cluster(gb_s=0.5), codec=(INT8,))
    work = work_of(run_of(lanes=4, compress="int8"), where, 4)
    found = predict(work)
    assert found.hidden_s == 0 and found.exposed_s == sum(one.seconds for one in work.stages[0].buckets)
    assert simulate_step(work).mean_s == pytest.approx(found.total_s)


def test_codecs_slow_each_other_down_like_computing():
    run = run_of(lanes=4, compress="int8")
    alone, beside = (
        predict(work_of(run, replace(cluster(gb_s=1e6, slowdown=slow), codec=(INT8,)), 4))
        for slow in ((1.0,), (1.0, 1.5, 1.75, 2.0))
    )
    for part in ("codec_s", "exposed_s", "compute_s"):
        assert getattr(beside, part) == pytest.approx(2 * getattr(alone, part), rel=1e-3)


def test_one_worker_compresses_and_several_lanes_send_their_sum():
    alone = predict(work_of(run_of(lanes=4, compress="int8"), nodes(), 1))
    assert alone.codec_s == pytest.approx(4 * VALUES * 2e-9) and alone.exchange_s == 0
    assert alone.update_s == pytest.approx(VALUES * 1e-9 * (4 * 1.0 + 3.0))
    one, four = (
        predict(work_of(run_of(lanes=lanes, compress="int8"), nodes(), 2)).sent_bytes for lanes in (2, 8)
    )
    assert four == pytest.approx(one * (4 + 1) / 2, rel=1e-2)  # the sum in fp32 there, a byte back


def test_factors_are_small_whatever_the_lanes():
    codec = (CodecTime("rank:4", 1.0, 4.0, 1.0),)
    found = [
        predict(work_of(run_of(lanes=lanes, compress="rank:4"), nodes(codec=codec), 2)) for lanes in (2, 8)
    ]
    values = 8_000_000
    assert found[0].sent_bytes == found[1].sent_bytes == 2 * 8 * 4 * (64 + 15625) * 4 / 2
    assert [each.codec_s for each in found] == pytest.approx([values * 1e-9, 4 * values * 1e-9])
    runs = [run_of(lanes=lanes, compress="rank:4") for lanes in (2, 8)]
    stages = [work_of(each, nodes(codec=codec), 2).stages[0] for each in runs]
    codecs = [sum(one.busy_s for one in stage.buckets) for stage in stages]
    assert codecs == pytest.approx([values * 4e-9, 2.5 * values * 4e-9])


def test_codecs_between_and_beyond_what_was_measured():
    rows = tuple(CodecTime(f"rank:{n}", 1.0 + n, 2.0 * n, 1.0) for n in (2, 4))
    where = nodes(codec=rows)
    for rank, lane, mean in ((2, 3.0, 4.0), (3, 4.0, 6.0), (8, 9.0, 16.0), (1, 3.0, 4.0)):
        found, is_measured = find_codec(where, read_compression(f"rank:{rank}"))
        assert (found.lane_ns, found.mean_ns, is_measured) == (lane, mean, True)
    guess, is_measured = find_codec(where, read_compression("top:0.01"))
    assert not is_measured and guess.lane_ns > find_codec(where, read_compression("int8"))[0].lane_ns > 0


CODECS = (
    CodecTime("bf16", 1.0, 1.0, 1.0),
    INT8,
    CodecTime("top:0.01", 10.0, 15.0, 1.0),
    CodecTime("rank:4", 40.0, 90.0, 1.0),
)


def advice(run, where, plan="data=4"):
    """Lines about compression beside a plan for four workers."""
    profile = chain(lanes=run.train.lanes)
    best = judge(run, profile, where, replace(read_plan(plan), data=4 // read_plan(plan).least))
    return "\n".join(line for line in explain(best, profile, where)[1:] if "compress" in line)


def test_advice_by_the_link():
    """Over slow links a scheme is named with what it brings; over fast ones it costs more than it saves."""
    run = run_of(lanes=4)
    said = advice(run, nodes(0.1, CODECS))
    assert said.startswith("train.compress=int8 would take ")
    assert "and send 12.1 MB instead of 48 MB: another run, whose accuracy must be looked at" in said
    assert advice(run, nodes(1e4, CODECS)).startswith("compression costs more than it saves: by data alone")
    assert advice(run, nodes(0.005, CODECS), "pipeline=4").endswith("this plan needs no compression")
    packed = with_compression(run, "int8")
    assert [str(one.plan) for one in find_plans(packed, chain(lanes=4), nodes(), 4)] == ["data=4"]
    said = advice(packed, nodes(0.1, CODECS))
    assert said.startswith("without compression a step would take") and "assumed" not in said
    assert advice(packed, nodes(1e4, CODECS)).startswith("train.compress=int8 costs more than it saves")
    assert advice(run, nodes(0.02, ())).endswith("; what codecs take is assumed, not measured")


def test_runs_that_compress_are_ranked_beside_the_others():
    run, profile = run_of(lanes=4, compress="int8", compress_after=2), chain(lanes=4)
    found = find_changed(run, profile, nodes(0.01), 4, "time", ["compress"])
    words = {one.change for one in found}
    assert "-o train.compress=none -o train.compress_after=0" in words and "-o train.compress=rank:4" in words
    assert found[-1].change.startswith("-o train.compress=none") and len(words) == 5
    plain = find_changed(run_of(lanes=4, wire="bf16"), profile, nodes(), 4, "time", ["compress"])
    assert {one.change for one in plain} == {""}  # a wire type and compression do not go together


def test_memory_that_compression_keeps():
    profile, plan = chain(), Plan(data=4)
    plain, blocks, factors = (
        worker_memory(run_of(compress=how), profile, plan, False) for how in ("none", "int8", "rank:4")
    )
    assert plain.feedback_gb == 0
    assert blocks.feedback_gb == pytest.approx(2 * 0.032 * (2 + 1 / 4))
    assert factors.feedback_gb == pytest.approx(2 * 0.032 * 2)
    assert blocks.total_gb == pytest.approx(plain.total_gb + blocks.feedback_gb)


def test_one_profile_serves_every_way_to_compress():
    assert as_profiled(run_of(compress="int8", compress_after=1)) == run_of()


def test_files_hold_codecs_and_weights(tmp_path):
    path = tmp_path / "c.toml"
    where = nodes(codec=(INT8, CodecTime("rank:4", 0.5, 1.0, 0.0)))
    path.write_text(write_cluster(where))
    assert cluster_from_table(read_toml(path)) == where
    for text, says in (
        ('scheme = "gzip"', r"codec.scheme: train.compress=gzip must be one of"),
        ('scheme = "none"', r"codec.scheme=none takes no time"),
        ("scheme = 8", r"codec.scheme=8 must be text"),
        ("lane_ns = -1.0", r"codec.lane_ns=-1.0 must be 0 or more"),
    ):
        key = text.partition(" ")[0]
        lines = [text if line.startswith(key) else line for line in path.read_text().splitlines()]
        with pytest.raises(SpecError, match=says):
            cluster_from_table(read_toml(_write(tmp_path / "bad.toml", lines)))
    profile = replace(chain(), weights=(WeightShape("a.weight", (3, 4)),), buffers=(7,))
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile
    table = json.loads((tmp_path / "p.json").read_text())
    del table["weights"], table["buffers"]  # as older files
    (tmp_path / "old.json").write_text(json.dumps(table))
    assert read_profile(tmp_path / "old.json") == replace(profile, weights=(), buffers=())
    table["weights"] = [{"name": "a.weight", "shape": [3, 0]}]
    (tmp_path / "bad.json").write_text(json.dumps(table))
    with pytest.raises(SpecError, match=r"weights.a.weight=0 must be whole numbers from 1"):
        read_profile(tmp_path / "bad.json")


def _write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_real_model_by_command(capsys):
    """AlexNet over a link of 1 Gb/s: it says what is assumed, and has bytes and exchange in JSON."""
    words = ["plan", "imagenet", "--cluster", "cpu-1g", "--workers", "32", "-o", "model.name=alexnet"]
    words += ["-o", "train.lanes=32", "-o", "train.batch=256", "-o", "train.precision=fp32", "--json"]
    assert command([*words, "-o", "train.compress=int8", "-o", "train.compress_after=1"]) == 0
    found = capsys.readouterr()
    assert "cpu-1g has no [[codec]] for train.compress=int8" in found.err
    assert "train.compress_after=1: predicted are the epochs after these" in found.err
    packed = json.loads(found.out)
    assert command(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert packed["compress"] == "int8" and [row["plan"] for row in packed["plans"]] == ["data=32"]
    rows = packed["plans"][0], next(row for row in plain["plans"] if row["plan"] == "data=32")
    assert (
        rows[0]["sent_bytes"] < 0.26 * rows[1]["sent_bytes"] and rows[0]["codec_s"] > rows[1]["codec_s"] == 0
    )
    assert rows[0]["exchange_s"] < 0.6 * rows[1]["exchange_s"]
    assert any(line.startswith("train.compress=") and "assumed" in line for line in plain["why"])
