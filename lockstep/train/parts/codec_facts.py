"""What a run tells of how its gradients are compressed: memory, who computes it, the identity's part."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.comm.compress.codec_library import compresses_by
from lockstep.spec import Run
from lockstep.spec.rule.compression import explain_compression, read_compression


def codec_numerics(text: str, device: torch.device) -> dict[str, str]:
    """By rank the order of sums depends on who computes; all other codecs give the same bits."""
    compression = read_compression(text)
    return {"factors": compresses_by(device)} if compression and compression.rank else {}


def explain_codecs(run: Run, model: nn.Module, device: torch.device) -> list[str]:
    """Notices: how much is compressed and remembered, and whether C would serve and cannot be compiled."""
    shapes = [p.shape for p in model.parameters() if p.requires_grad and p.dtype == torch.float32]
    found = explain_compression(run.train.compress, shapes, run.train.lanes)
    if found and run.train.compress_after >= run.train.epochs:
        found.append(
            f"train.compress_after={run.train.compress_after}: none of train.epochs={run.train.epochs} is "
            "compressed: lower it to compress"
        )
    if found and device.type == "cpu" and compresses_by(device) == "torch":
        found.append(
            "no C compiler is found, so torch compresses gradients, which is far slower: install gcc or clang"
        )
    return found


def describe_codecs(run: Run, model: nn.Module, device: torch.device, notices: list[str]) -> dict[str, str]:
    """Add the notices; returns the identity's part."""
    notices += explain_codecs(run, model, device)
    return codec_numerics(run.train.compress, device)
