"""`data.normalize`: the mean and the standard deviation that images are normalized by, as text."""

from __future__ import annotations

from lockstep.errors import SpecError

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std, one number or one a channel


def split_normalize(text: str) -> Statistics | None:
    """Mean and std of `M,M,M/S,S,S`; None for no text: the data set's own."""
    if not text:
        return None
    try:
        mean, std = (tuple(float(part) for part in half.split(",")) for half in text.split("/"))
    except ValueError:
        mean, std = (), ()
    is_finite = all(abs(value) < float("inf") for value in (*mean, *std))
    if not (mean and len(mean) == len(std) and is_finite and min(std) > 0):
        raise SpecError(
            f"data.normalize={text} must be MEAN/STD, of images from 0 to 1 and STD above 0, as 0.5/0.5, "
            "or a number a channel: 0.485,0.456,0.406/0.229,0.224,0.225"
        )
    return mean, std


def fit_channels(text: str, channels: int) -> Statistics | None:
    """The same with a number for each of so many channels."""
    found = split_normalize(text)
    if found is None or len(found[0]) == channels:
        return found
    if len(found[0]) > 1:
        raise SpecError(f"data.normalize={text} has {len(found[0])} channels, and the images have {channels}")
    return found[0] * channels, found[1] * channels
