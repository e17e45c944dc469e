"""The samples of a user's data set as tensors: images and targets.

Images are tensors (C H W or H W), NumPy arrays (H W C or H W) or Pillow images. Targets are class numbers; or
masks, vectors, numbers, and dicts and tuples of them. Shapes: C channels, H, W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.kernels.structure import describe, leaves, zip_tensors

_OTHER = "; targets of any shape need a loss of yours, as loss="
_CHANNELS = 4  # an array with more is probably C H W by mistake


def as_image(image: Any) -> Tensor:
    """An image as a tensor [C, H, W], uint8 or fp32; TypeError if it is none."""
    if isinstance(image, Image.Image):
        image = np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    if isinstance(image, np.ndarray):
        array = torch.from_numpy(np.array(image))
        if array.dim() == 3 and array.shape[2] > _CHANNELS >= array.shape[0]:
            raise TypeError(
                f"an array is H x W x C, so this one has {array.shape[2]} channels: give "
                "torch.from_numpy(image) if it is C x H x W"
            )
        tensor = array.permute(2, 0, 1).contiguous() if array.dim() == 3 else array
    elif isinstance(image, Tensor):
        tensor = image.detach()
    else:
        raise TypeError(f"an image is a tensor, an array or a Pillow image, not {type(image).__name__}")
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 3 or not (tensor.dtype == torch.uint8 or tensor.is_floating_point()):
        raise TypeError(f"an image is uint8 or float in 2 or 3 dims, not {describe(tensor)}")
    return tensor.float() if tensor.is_floating_point() else tensor


def is_label(value: Any) -> bool:
    """Whether a target is a class number: one integer."""
    try:
        as_label(value)
    except TypeError:
        return False
    return True


def as_label(value: Any) -> int:
    """A class number; TypeError if it is anything else."""
    size = value.numel() if isinstance(value, Tensor) else np.size(value)
    if size != 1:
        raise TypeError(
            f"a label is an integer, not {size} values: for a one-hot label, give its argmax(){_OTHER}"
        )
    number = value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"a label is an integer, not {type(value).__name__}{_OTHER}")
    return number


def as_target(value: Any) -> Any:
    """A target as a structure of tensors; a Pillow image is a mask of integers [H, W]."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Image.Image):
        return torch.from_numpy(np.array(value)).long()
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if isinstance(value, dict):
        return {key: as_target(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(as_target(part) for part in value)
    raise TypeError(
        f"a target is a tensor, an array, a number, a Pillow image, or a dict or tuple of those, not "
        f"{type(value).__name__}"
    )


def stack_targets(targets: Sequence[Any]) -> Any:
    """Targets of one shape as one structure, along a new first dim; their tensors are copied."""
    return zip_tensors(torch.stack, targets)


def check_alike(target: Any, first: Any) -> None:
    """TypeError if a target has other shapes or types than the first one."""
    if describe(target) != describe(first):
        raise TypeError(
            f"its target is {describe(target)}, the first one is {describe(first)}: all must be alike; "
            "pad them in the data set, or train in a loop of your own with `collate` (lockstep.lanes)"
        )


def is_mask(target: Any, height: int, width: int) -> bool:
    """Whether a part of a target lies on the pixels of an image, so that it would have to move with them."""
    return any(part.dim() > 1 and part.shape[-2:] == (height, width) for part in leaves(target))


def sample_bytes(image: Tensor, target: Any) -> bytes:
    """The bytes of a sample, for a hash."""
    if isinstance(target, int):
        return f"{describe(image)} {target}".encode() + image.contiguous().numpy().tobytes()
    parts = [image, *leaves(target)]
    told = "; ".join(map(describe, (image, target))).encode()
    return told + b"".join(part.contiguous().numpy().tobytes() for part in parts)
