"""optimizer.decay_norms=false: one hash under every plan, and another one than with true.

At 40 pixels a weight of LeNet-5 has more than 2¹⁶ values, so that it is cut into shares.
"""

import pytest
from plan_runs import HASHES, hashes, run

KEYS = (
    *("data.size=40", "data.num_train=64", "data.num_test=16", "train.lanes=4", "train.slices=2"),
    *("optimizer.weight_decay=0.1", "train.epochs=1", "train.clip=1.0", "train.ema=0.9"),
)
WITHOUT = (*KEYS, "optimizer.decay_norms=false")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "plan",
    [
        "data=2,shard=optimizer",
        "data=3,shard=parameters",
        "pipeline=2",
        "data=2,layers=hidden*",
    ],
)
def test_one_hash(plan, by_one_worker, tmp_path):
    alone = by_one_worker(*WITHOUT)
    run(tmp_path, "--plan", plan, overrides=WITHOUT)
    assert hashes(tmp_path / "run") == {key: alone.get(key) for key in HASHES}


def test_it_is_another_run(by_one_worker):
    with_norms, without = by_one_worker(*KEYS), by_one_worker(*WITHOUT)
    assert with_norms["weights_sha256"] != without["weights_sha256"]
    assert with_norms["identity"] != without["identity"]
