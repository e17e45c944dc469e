"""The defaults of the recipes `folder` and `finetune` for a folder: pure functions of what is known of it.

`cli/data_action/folder_defaults.py` asks it before a run is trained or shown. Test images take no part.
"""

from __future__ import annotations

from bisect import bisect
from typing import Any

_PHOTO_SIDE = 96  # from here on, images are photographs, of which a part shows what the whole does
_MANY = 100_000  # images: enough for the larger model, at the size that it was published with
_FEW_OF_A_CLASS = 1000  # images: below, colours are changed, too
_LENGTHS = (1_000, 5_000, 20_000, 100_000, 500_000)  # images, between the epochs below
_EPOCHS = (200, 100, 50, 24, 20, 16)
_PHOTO_EPOCHS = (200, 120, 80, 40, 30, 18)
_TUNED_EPOCHS = (30, 20, 12, 8, 6, 5)
_BATCHES = (32, 64, 128, 256, 256, 256)
_LANES = (2, 2, 4, 4, 4, 4)
_PHOTO_SIZES = (96, 128, 160)  # the largest that is not above the images'


def choose_defaults(
    num_train: int, num_classes: int, side: int, channels: int, has_gpu: bool
) -> dict[str, Any]:
    """Keys of a Run for `num_train` images; `side` is the median of their shorter sides, in pixels.

    Few images want many epochs in small batches. Small images keep their size, and get the settings of the
    recipe `cifar10`; of photographs random parts are shown. Most CPUs take many times as long in bf16.
    """
    amount = bisect(_LENGTHS, num_train)
    is_photo, is_large = side >= _PHOTO_SIDE, side >= _PHOTO_SIDE and num_train >= _MANY
    batch = min(_BATCHES[amount], 1 << max(num_train // 2, 2).bit_length() - 1)
    return {
        "model": {"name": "resnet50" if is_large else "resnet18"},
        "data": {
            "size": _size(side, is_large),
            "channels": channels,
            "augment": _augment(num_train / num_classes, is_photo, is_large),
        },
        "train": {
            "epochs": (_PHOTO_EPOCHS if is_photo else _EPOCHS)[amount],
            "batch": batch,
            "lanes": _LANES[amount] if batch >= 32 else 1,
            "precision": "bf16" if amount and has_gpu else "fp32",
            "label_smoothing": 0.1,
            "channels_last": True,
        },
        "optimizer": {
            "name": "nag",
            "lr": (0.1 if is_large else 0.2) * batch / 256,
            "weight_decay": 1e-4 if is_large else 5e-4,
            "decay_norms": not is_large,
        },
        "schedule": {"name": "onecycle", "warmup_epochs": 0.0},
    }


def choose_finetuning(num_train: int, has_gpu: bool) -> dict[str, Any]:
    """Keys of a Run that begins with good weights: fewer epochs, and smaller rates.

    Images keep the size that the weights were trained at, whatever their own is.
    """
    amount = bisect(_LENGTHS, num_train)
    batch = min(_BATCHES[amount], 1 << max(num_train // 2, 2).bit_length() - 1)
    return {
        "model": {"name": "resnet50" if has_gpu else "resnet18"},
        "data": {},
        "train": {
            "epochs": _TUNED_EPOCHS[amount],
            "batch": batch,
            "lanes": _LANES[amount] if batch >= 32 else 1,
            "precision": "bf16" if has_gpu else "fp32",
        },
        "optimizer": {"lr": 0.04 * batch / 256},
    }


def _size(side: int, is_large: bool) -> int:
    if side < _PHOTO_SIDE:
        return min(side, 64)
    return min(side, 224) if is_large else max(size for size in _PHOTO_SIZES if size <= side)


def _augment(images_a_class: float, is_photo: bool, is_large: bool) -> list[str]:
    if not is_photo:
        return ["flip", "crop", "cutout"]
    changes = ["trivial_augment"] if images_a_class < _FEW_OF_A_CLASS else []
    return ["random_resized_crop" if is_large else "random_resized_crop:0.35:1", "flip", *changes]
