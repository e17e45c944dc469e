"""Our own kernels in Triton and the functions that launch them: all lanes of a worker in one launch.

A sample's forward pass and data gradient do not depend on its batch, because every row of a tile is summed
over K alone, in one order. Sums over samples are kept separate for each lane.
"""

from __future__ import annotations

import torch


def is_usable(device: torch.device) -> bool:
    """Whether the kernels run on this device: a GPU, or any device with Triton's interpreter."""
    import triton

    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)
