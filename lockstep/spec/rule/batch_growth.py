"""`train.batch` by epoch: one number, or several with their first epochs, as `256@0,512@10,1024@15`."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, NamedTuple

from lockstep.errors import SpecError

_MOST = 2**24


class BatchStage(NamedTuple):
    """Epochs whose steps have the same batch."""

    epochs: range
    batch: int

    def steps(self, images: int, within: range) -> int:
        """The steps of those of its epochs that are within others, of so many training images."""
        first, stop = max(self.epochs.start, within.start), min(self.epochs.stop, within.stop)
        return len(range(first, stop)) * (images // self.batch)


def split_batches(value: Any, growth: str) -> tuple[Any, str]:
    """The first batch, and the later ones as `512@10,1024@15`; `value` is what was given as `train.batch`.

    What is no text is given back as it is.
    """
    if not isinstance(value, str):
        return value, growth
    first, comma, rest = value.replace(" ", "").partition(",")
    match = re.fullmatch(r"([1-9]\d{0,8})@0", first)
    if not match or bool(comma) != bool(rest):
        raise _refuse(value)
    return int(match[1]), rest


def join_batches(batch: int, growth: str) -> int | str:
    """The value of `train.batch` as a person writes it."""
    return f"{batch}@0,{growth}" if growth else batch


def find_stages(batch: int, growth: str, epochs: int, lanes: int) -> tuple[BatchStage, ...]:
    """The stages of a run of so many epochs and lanes; SpecError if there are none such."""
    written = str(join_batches(batch, growth))
    found = [re.fullmatch(r"([1-9]\d{0,8})@(\d{1,6})", part) for part in growth.split(",") if growth]
    begins = [(0, batch), *((int(match[2]), int(match[1])) for match in found if match)]
    if not all(found) or not all(first < then for (first, _), (then, _) in pairwise(begins)):
        raise _refuse(written)
    last, size = begins[-1]
    if last >= epochs and growth:
        raise SpecError(
            f"train.batch={written}: {size}@{last} begins after the last epoch, as train.epochs={epochs} and "
            "epochs count from 0: raise train.epochs, or let it begin earlier"
        )
    for _, size in begins:
        _check_size(size, lanes)
    ends = [first for first, _ in begins[1:]] + [epochs]
    return tuple(BatchStage(range(first, end), b) for (first, b), end in zip(begins, ends, strict=True))


def _check_size(batch: int, lanes: int) -> None:
    """Refuse a batch that the lanes do not divide, or that is too large for any device."""
    if batch % lanes:
        lower, upper = batch // lanes * lanes, -(-batch // lanes) * lanes
        fix = f"use batch {upper}" + (f" or {lower}" if lower else "") + ", or other lanes"
        raise SpecError(
            f"train.batch={batch} is not divisible by train.lanes={lanes}: every lane holds batch/lanes "
            f"samples; {fix}"
        )
    if batch > _MOST:
        raise SpecError(f"train.batch={batch} must be at most {_MOST}")


def _refuse(value: str) -> SpecError:
    return SpecError(
        f"train.batch={value} must be a whole number, or batches with their first epochs, from 0 on and "
        "rising, such as 256@0,512@10,1024@15"
    )
