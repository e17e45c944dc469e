"""Stages on a real GPU that two or four workers share: a trained run used in parts."""

import json

import pytest
import torch
from small import call, command, small_run, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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
