"""Kernels of our own in Triton, each with what launches it: all lanes of a worker in one launch.

A sample's forward and data gradient do not depend on the batch it is in, because every row of a tile is
summed over K alone, in one order; what reduces over samples is written lane by lane.
"""

from __future__ import annotations

import torch


def is_usable(device: torch.device) -> bool:
    """Whether the kernels run there: on a GPU, or anywhere by Triton's interpreter."""
    import triton

    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)
