"""The promise under plans: the weights of one worker, whatever the stages, the schedule and the lanes."""

import pytest
from small import call, small_run, summary, train, train_command

EVERYTHING = ("train.lanes=8", "train.epochs=1", "data.augment=flip,crop", "train.ema=0.9", "train.clip=1.0")
SMALL = ("train.batch=16", "data.num_train=40", "data.num_test=21")
MODELS = {
    "lenet5": EVERYTHING,
    "resnet18": (*EVERYTHING, *SMALL, "model.name=resnet18", "train.channels_last=true"),
    "googlenet": (*EVERYTHING, *SMALL, "model.name=googlenet"),
    "alexnet": (*EVERYTHING, *SMALL, "model.name=alexnet", "data.size=64"),
    "vgg11": (*EVERYTHING, *SMALL, "model.name=vgg11", "data.size=32"),
}
COVERING = [
    ("lenet5", "pipeline=2"),
    ("lenet5", "data=2,pipeline=2,schedule=gpipe"),
    ("lenet5", "data=3,pipeline=2,cost=counted"),
    ("resnet18", "pipeline=3"),
    ("googlenet", "pipeline=4,schedule=gpipe"),
    ("alexnet", "pipeline=2,cost=counted"),
    ("vgg11", "data=2,pipeline=2"),
]
HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy", "identity")


def hashes(directory):
    found = summary(directory)
    return {key: found[key] for key in HASHES}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The hashes of a run by one worker, computed once for each model."""
    known = {}

    def find(model):
        if model not in known:
            result, _ = train(small_run(*MODELS[model]), tmp_path_factory.mktemp("alone"))
            known[model] = hashes(result.directory)
        return known[model]

    return find


@pytest.mark.gloo
@pytest.mark.parametrize(("model", "plan"), COVERING)
def test_a_plan_gives_the_bits_of_one_worker(model, plan, reference, tmp_path):
    done = call(train_command(tmp_path, "--plan", plan, "--name", "run", overrides=MODELS[model]))
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "run") == reference(model)
