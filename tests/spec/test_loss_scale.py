"""The scale of the loss in fp16: how it moves, and what is refused."""

import pytest

from lockstep.errors import SpecError
from lockstep.spec import Run, Train
from lockstep.spec.identity import make_identity
from lockstep.spec.rule.loss_scale import MOST, LossScale, begin_scale


def test_it_is_halved_by_overflows_and_doubled_after_enough_steps():
    scale, seen = LossScale(8.0), []
    for overflow in (True, False, False, False, True, True, False, True):
        scale = scale.after(overflow, growth=3)
        seen.append((scale.value, scale.steps, scale.skipped))
    assert seen == [(4, 0, 1), (4, 1, 1), (4, 2, 1), (8, 0, 1), (4, 0, 2), (2, 0, 3), (2, 1, 3), (1, 0, 4)]
    assert not scale.can_shrink and scale.inverse == 1.0
    assert LossScale(MOST).after(overflow=False, growth=1) == LossScale(MOST)
    assert scale.tell() == "4 steps overflowed in fp16 and changed no weight; the loss scale is 1"
    assert not LossScale().tell()
    assert begin_scale("fp16", 4.0) == LossScale(4.0) and begin_scale("bf16", 4.0) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss_scale": 3.0}, r"train.loss_scale=3.0 must be a power of two from 1 to 2\^40"),
        ({"loss_scale": 0.5}, "train.loss_scale=0.5 must be a power of two"),
        ({"loss_scale": 2.0**41}, "must be a power of two from"),
        ({"scale_growth": 0}, "train.scale_growth=0 must be at least 1"),
        ({"precision": "bf16", "loss_scale": 4.0}, "works with train.precision=fp16 only, which is bf16"),
        ({"precision": "bf16", "scale_growth": 4}, "works with train.precision=fp16 only, which is bf16"),
        ({"local_steps": 2}, "train.local_steps=2 does not work with train.precision=fp16"),
        ({"clip_value": -1.0}, "train.clip_value=-1.0 must be 0"),
        ({"clip_value": 1.0, "clip": 1.0}, "train.clip_value=1.0 does not go with train.clip=1: clip by"),
        ({"recompute": True, "bands": 2}, "train.recompute=true does not go with train.bands=2"),
    ],
)
def test_what_makes_no_sense_is_refused(keys, message):
    with pytest.raises(SpecError, match=message):
        Train(**{"precision": "fp16", **keys})


def test_a_run_that_uses_none_of_it_keeps_its_identity():
    def keys(**train):
        run = Run(train=Train(**train))
        return set(make_identity(run, data={}, model={}, fingerprint={}, kernels={}))

    plain = keys()
    assert not {"train.loss_scale", "train.scale_growth", "train.clip_value", "train.recompute"} & plain
    assert keys(recompute=True) == plain
    assert keys(precision="fp16", loss_scale=4.0, clip_value=1.0) - plain == {
        "train.loss_scale",
        "train.clip_value",
    }
