"""The batch file of the examples under a real Slurm with two nodes, where Slurm is installed."""

import sys
from pathlib import Path

import pytest
from small import OVERRIDES, rows, small_run, summary, train

KEYS = ("train.epochs=20", "checkpoint.every_steps=1000", "data.num_test=10")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    import slurm_cluster

    if missing := slurm_cluster.what_is_missing():
        pytest.skip(f"no Slurm can be made here: {missing}")
    folder = tmp_path / "slurm"
    folder.mkdir()
    return slurm_cluster.SlurmCluster(folder, 2, "SlurmctldParameters=preempt_send_user_signal")


@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_a_job_that_has_to_give_way_is_warned_saves_and_goes_on_to_the_same_bits(slurm, tmp_path):
    words = ["shapes", *(word for key in (*OVERRIDES, *KEYS) for word in ("-o", key))]
    with slurm as cluster:
        job, run = cluster.train("train.sbatch", ["--nodes=2", "--ntasks-per-node=1", "-c1"], *words)
        cluster.wait_for((run / "metrics.jsonl").is_file, "the training")
        cluster.wait_for(lambda: rows(run, "step"), "a step")
        cluster.submit("--partition=high", "--nodes=2", "--wrap", "true")
        cluster.wait_for(lambda: cluster.state(job) == "COMPLETED", "the job's end")
        assert cluster.facts(job)["Restarts"] == "1"
        said = cluster.log(job)
    assert f"Slurm's job {job} is queued again, and goes on from what is saved" in said, said
    expected, _ = train(small_run(*KEYS), tmp_path / "calm")
    assert summary(run)["weights_sha256"] == expected.summary["weights_sha256"]
    steps = [row["step"] for row in rows(run, "step")]
    assert steps == list(range(1, expected.summary["steps"] + 1)), "each step once"
