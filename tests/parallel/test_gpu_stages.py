"""Stages on a real GPU that two workers share: what fits only in parts, and a trained run used in parts."""

import json
import sys

import pytest
import torch
from small import call, command, small_run, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LARGE = """
import sys, torch, lockstep
from torch import nn

class Images:
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(i)), i % 3

torch.manual_seed(0)
torch.cuda.set_per_process_memory_fraction(float(sys.argv[2]) * 2**30 / torch.cuda.mem_get_info()[1])
layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
for _ in range(12):
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))
run = lockstep.Run(train=lockstep.Train(epochs=1, batch=16, lanes=2), data=lockstep.Data(augment=()))
launch = lockstep.Launch(name="large", device="cuda", backend="auto", plan=sys.argv[1], quiet=True)
result = lockstep.train(run, net, (Images(), Images()), launch=launch)
if lockstep.is_main():
    print(result.summary["weights_sha256"])
"""


def test_a_lane_that_fits_only_in_stages_trains(tmp_path):
    """A lane of the whole model needs 3.5 GB; half of it fits into 2.6."""
    (tmp_path / "script.py").write_text(LARGE)
    cases = {"alone": ("pipeline=1", "30"), "short": ("pipeline=1", "2.6"), "stages": ("pipeline=2", "2.6")}
    done = {
        name: call([sys.executable, "script.py", *case], timeout=200, cwd=tmp_path)
        for name, case in cases.items()
    }
    assert done["short"].returncode and "--plan pipeline=2" in done["short"].stderr, done["short"]
    assert done["stages"].returncode == done["alone"].returncode == 0, done
    assert done["stages"].stdout == done["alone"].stdout


KEYS = "train.precision=bf16", "data.size=48", "train.epochs=1", "train.ema=0.9"
KINDS = {
    "fused": (*KEYS, "model.name=emotion48", "kernels.set=fused"),
    "residual": (*KEYS, "model.name=resnet18", "kernels.set=fused"),
    "compiled": (*KEYS, "model.name=resnet18", "kernels.set=compiled"),
    "stock": (*KEYS, "model.name=googlenet", "kernels.set=stock"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_in_stages_has_the_loss_of_training(kind, tmp_path):
    result, _ = train(small_run(*KINDS[kind]), tmp_path, launch={"device": "cuda", "name": "run"})
    for plan in ("pipeline=2", "data=2,shard=parameters" if kind == "stock" else "data=2,pipeline=2"):
        words = ["--runs-dir", str(tmp_path), "--json", "--plan", plan]
        done = call(command("eval", "run", *words), timeout=200)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["loss"] == result.summary["loss"], plan
