"""Twenty convolutional networks of timm, cut into two stages: how many train to the bits of the uncut model.

python benchmarks/pipeline_timm.py

The list was fixed before any was tried. Each model computes one lane in training mode, whole and as two
stages with copies between them; loss, gradients and buffers are compared bit by bit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from measure import make_parser, make_record

from lockstep.errors import LockstepError
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.models import build
from lockstep.parallel.cut import choose_cuts
from lockstep.spec.record import write_records

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from parallel.staged import cut, same, trace, uncut

MODELS = (
    "resnet50", "resnext50_32x4d", "wide_resnet50_2", "seresnet50", "densenet121", "vgg16_bn",
    "mobilenetv2_100", "mobilenetv3_large_100", "efficientnet_b0", "efficientnetv2_rw_s", "regnety_016",
    "convnext_tiny", "inception_v3", "xception41", "dpn68", "hrnet_w18", "res2net50_26w_4s", "dla34",
    "ghostnet_100", "cspresnet50",
)  # fmt: skip
SAMPLES, SIDE = 2, 128


def main() -> None:
    options = make_parser(__doc__, "pipeline-timm.json").parse_args()
    found, reasons = [], {}
    with plain_torch():
        prepare_device("cpu", threads=4)
        for name in MODELS:
            start, answer = time.perf_counter(), ""
            try:
                answer = try_model(name)
            except LockstepError as error:
                answer = str(error)
            found.append(float(not answer))
            reasons |= {name: answer} if answer else {}
            print(f"{name}: {answer or 'equal'} ({time.perf_counter() - start:.1f} s)", flush=True)
    name = f"networks of timm that give the same bits as two stages, of {len(MODELS)}"
    equal = make_record(name, [sum(found)], "networks", refused=reasons)
    print(f"{sum(found):.0f} of {len(MODELS)}")
    write_records(options.output, [equal])


def try_model(name: str) -> str:
    """Empty if the two stages give the bits of the whole model."""
    torch.manual_seed(0)
    options = {"drop_path_rate": 0.1} if name in ("resnet50", "efficientnet_b0", "convnext_tiny") else {}
    model = build(f"timm:{name}", in_channels=3, num_classes=10, image_size=(SIDE, SIDE), options=options)
    images = torch.randn(SAMPLES, 3, SIDE, SIDE)
    graph, trial = trace(model.train(), images)
    whole, again = uncut(model, images), uncut(model, images)
    if not same(whole, again):
        return "the uncut model gives other bits when it is computed again"
    parts = cut(model, images, graph, trial, choose_cuts(trial.costs, trial.allowed, 2))
    odd = [key for key in whole if key not in parts or not torch.equal(whole[key], parts[key])]
    return f"other bits in {len(odd)} of {len(whole)} tensors, such as {odd[-1]}" if odd else ""


if __name__ == "__main__":
    main()
