"""Batch norm over workers: statistics of each band, then their tree; each worker has its rows and channels.

Moments are combined in float64, pair by pair (Chan et al.), so the order is the tree's and the error small.
What follows is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from lockstep.parallel.split.axes import Axes, sum_leaves
from lockstep.parallel.split.spread import Spread

Pair = tuple[Tensor, Tensor]


@dataclass
class NormCut:
    """A batch norm in training mode, whose input's rows are in bands or whose channels are dealt out."""

    axes: Axes
    given: Spread
    eps: float
    momentum: float

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Sequence[Tensor]
    ) -> Tensor:
        """The normalized values; `running` mean and variance of all channels are updated."""
        own = self._own_channels(x)
        weight, bias = (None if whole is None else whole[own] for whole in (weight, bias))
        parts = [whole[own].clone() for whole in running]
        if self.given.rows:
            moments, num = self.moments(x)
            out: Tensor = _Normalize.apply(x, weight, bias, moments, num, self)  # type: ignore[no-untyped-call]
            new = [moments[0], moments[1] * (num / (num - 1))]
            parts = [
                old * (1 - self.momentum) + self.momentum * now.to(old.dtype)
                for old, now in zip(parts, new, strict=True)
            ]
        else:
            mean, variance = parts
            out = batch_norm(x, mean, variance, weight, bias, True, self.momentum, self.eps)
        with torch.no_grad():
            for whole, part in zip(running, parts, strict=True):
                whole.copy_(self.axes.all_channels(part[None], self.given)[0])
        return out

    def _own_channels(self, x: Tensor) -> slice:
        channels = self.given.channels
        (own,) = channels[self.axes.channel.rank] if channels else (range(x.shape[1]),)
        return slice(own.start, own.stop)

    @torch.no_grad()
    def moments(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
        """Mean and variance in float64 over all pixels of all samples."""
        rows, per_row = self.given.rows, len(x) * x.shape[3]
        bands = self.axes.own_bands(rows)
        found = [
            torch.stack([mean.double(), variance.double() * (len(band) * per_row)])
            for band, (mean, variance) in zip(bands, self._by_band(x, _moments), strict=True)
        ]
        root = _combine(found, [len(band) * per_row for band in bands], [1] * len(bands))
        counts = [len(ranges[0]) * per_row for ranges in self.axes.rows_of_all(rows)]
        shares = [len(dealt) for dealt in self.axes.bands_of_all]
        mean, squares = _combine(self.axes.gather_small(root), counts, shares)
        return (mean, squares / (rows * per_row)), rows * per_row

    def sums(self, x: Tensor, dy: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
        """Σ dy·x̂ and Σ dy over all pixels, in float64."""
        args = mean, invstd, self.eps
        found = self._by_band(x, lambda x, dy: _sums(x, dy, *args), dy)
        scaled, plain = self.axes.sum_small(sum_leaves([torch.stack(pair).double() for pair in found]))
        return scaled, plain

    def _by_band(self, x: Tensor, find: Callable[..., Pair], *others: Tensor) -> list[Pair]:
        """Two numbers for each channel of each of this worker's bands, of some tensors.

        If bands are alike, they are taken for channels, without copies.
        """
        own, bands = self.axes.own_rows(self.given.rows), self.axes.own_bands(self.given.rows)
        tensors = (x, *others)
        if self.given.rows % self.axes.bands == 0 and all(t.is_contiguous() for t in tensors):
            count, height, (samples, channels, _, width) = len(bands), len(bands[0]), x.shape
            views = [t.view(samples, channels * count, height, width) for t in tensors]
            first, second = (found.view(channels, count) for found in find(*views))
            return [(first[:, band], second[:, band]) for band in range(count)]
        return [find(*(_cell(tensor, band, own) for tensor in tensors)) for band in bands]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: tuple[Tensor, Tensor],
        num: int,
        cut: NormCut,
    ) -> Tensor:
        mean, variance = moments
        invstd = 1.0 / (variance + cut.eps).sqrt()
        scale = invstd if weight is None else invstd * weight.double()
        shift = -mean * scale if bias is None else bias.double() - mean * scale
        ctx.cut, ctx.num = cut, num
        ctx.save_for_backward(x, weight, mean, invstd)
        return _affine(x, scale, shift)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        scaled, plain = ctx.cut.sums(x, dy, mean.float(), invstd.float())
        grad = None
        if ctx.needs_input_grad[0]:
            scale = invstd if weight is None else invstd * weight.double()
            slope = scale * invstd * scaled / ctx.num  # dx = scale·dy − slope·x − rest
            rest = scale * plain / ctx.num - slope * mean
            grad = _affine(x, -slope, -rest).add_(_affine(dy, scale, torch.zeros_like(scale)))
        needs = ctx.needs_input_grad
        weight_grad = scaled.to(weight.dtype) if weight is not None and needs[1] else None
        bias_grad = plain.to(x.dtype) if needs[2] else None
        return grad, weight_grad, bias_grad, None, None, None


def _cell(x: Tensor, band: range, own: range) -> Tensor:
    """A band's rows, without gaps."""
    cell = x.narrow(2, band.start - own.start, len(band))
    is_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return cell.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def _combine(parts: Sequence[Tensor], counts: Sequence[int], bands: Sequence[int]) -> Tensor:
    """Moments of neighbouring aligned subtrees of so many bands, pair by pair."""
    waiting: list[tuple[Tensor, int, int]] = []
    for part, number, size in zip(parts, counts, bands, strict=True):
        waiting.append((part, number, size))
        while len(waiting) > 1 and waiting[-2][2] == waiting[-1][2]:
            (left, few, half), (right, more, _) = waiting[-2:]
            waiting[-2:] = [(_pair(left, right, few, more), few + more, 2 * half)]
    return waiting[0][0]


def _pair(left: Tensor, right: Tensor, left_count: int, right_count: int) -> Tensor:
    """Mean and squared differences of two sets of values, of those of each."""
    total = left_count + right_count
    between = right[0] - left[0]
    mean = left[0] + between * (right_count / total)
    squares = left[1] + right[1] + between * between * (left_count * (right_count / total))
    return torch.stack([mean, squares])


def _moments(x: Tensor) -> Pair:
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, variance


def _sums(x: Tensor, dy: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Pair:
    """Σ dy·x̂ and Σ dy for each channel, or each band of each channel."""
    times = x.shape[1] // len(mean)
    mean, invstd = mean.repeat_interleave(times), invstd.repeat_interleave(times)
    _, scaled, plain = torch.ops.aten.native_batch_norm_backward(
        dy, x, torch.ones_like(mean), None, None, mean, invstd, True, eps, [False, True, True]
    )
    return scaled, plain


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """scale·x + shift for each channel in one pass: a batch norm whose mean is 0 and variance 1."""
    zeros, ones = (torch.full_like(scale, value, dtype=torch.float32) for value in (0.0, 1.0))
    out: Tensor = torch.ops.aten.native_batch_norm(
        x, scale.float(), shift.float(), zeros, ones, False, 0.0, 0.0
    )[0]
    return out
