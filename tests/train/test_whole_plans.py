"""Rules that look at whole parameters: one hash by any number of workers, and under every plan.

At 40 pixels a weight of LeNet-5 has more than 2¹⁶ values, so that other rules would cut it into shares.
"""

import pytest
from plan_runs import HASHES, hashes, run

KEYS = (
    *(
        "data.size=40",
        "data.num_train=64",
        "data.num_test=16",
        "train.batch=16",
        "train.lanes=8",
        "train.epochs=1",
    ),
    "optimizer.weight_decay=0.01",
)
RUNS = {
    "lars": (*KEYS, "optimizer.name=lars", "optimizer.lr=5", "train.clip=1.0", "train.ema=0.9"),
    "lamb": (*KEYS, "optimizer.name=lamb", "optimizer.lr=0.02", "train.wire=bf16"),
    "muon": (*KEYS, "optimizer.name=muon", "optimizer.lr=0.02", "train.ema=0.9"),
}
WAYS = [
    *(("--workers", str(workers)) for workers in (2, 3, 4, 8)),
    *(("--plan", f"data={n},shard={what}") for n in (2, 4) for what in ("optimizer", "parameters")),
    ("--plan", "data=2,pipeline=2"),
]


@pytest.mark.gloo
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[1])
@pytest.mark.parametrize("name", RUNS)
def test_one_hash(name, way, by_one_worker, tmp_path):
    alone = by_one_worker(*RUNS[name])
    run(tmp_path, *way, overrides=RUNS[name])
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}


@pytest.mark.gloo
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_in_mid_epoch_with_other_workers(name, by_one_worker, tmp_path):
    keys = (*RUNS[name], "checkpoint.every_steps=1", "checkpoint.keep=9")
    run(tmp_path, "--workers", "2", overrides=keys)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if int(path.stem[5:]) > 2:
            path.unlink()
    (tmp_path / "run" / "summary.json").unlink()
    run(tmp_path, "--plan", "data=3,shard=optimizer", "--resume", "auto", overrides=keys)
    alone = by_one_worker(*RUNS[name])
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}
