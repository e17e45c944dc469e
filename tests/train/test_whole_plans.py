"""Rules that look at whole parameters: one hash by any number of workers, and under every plan."""

import pytest
from plan_runs import HASHES, hashes, run

KEYS = (
    *("data.num_train=64", "data.num_test=16", "train.batch=16", "train.lanes=8", "train.epochs=1"),
    "optimizer.weight_decay=0.01",
)
RUNS = {
    "lars": (*KEYS, "optimizer.name=lars", "optimizer.lr=5", "train.clip=1.0", "train.ema=0.9"),
    "lamb": (*KEYS, "optimizer.name=lamb", "optimizer.lr=0.02", "train.wire=bf16"),
}
WAYS = [
    *(("--workers", str(workers)) for workers in (2, 3, 4, 8)),
    ("--plan", "data=2,shard=parameters"),
    ("--plan", "data=4,shard=optimizer"),
    ("--plan", "pipeline=2"),
]


@pytest.mark.gloo
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[1])
@pytest.mark.parametrize("name", RUNS)
def test_one_hash(name, way, by_one_worker, tmp_path):
    alone = by_one_worker(*RUNS[name])
    run(tmp_path, *way, overrides=RUNS[name])
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}
