"""Which rows of an image lie under which windows: the row arithmetic of convolutions and pools.

A window is numbered by the row it makes: window o lies over the rows o·stride − padding + k·dilation, for k
from 0 to kernel − 1. Rows are ranges of step 1, numbered over the whole image.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """How output rows depend on input rows."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """The rows from the first of a window to its last, both counted."""
        return (self.kernel - 1) * self.dilation + 1

    def frame(self, out: range) -> range:
        """The input rows under the windows of these output rows, those outside the image too."""
        start = out.start * self.stride - self.padding
        return range(start, start + (len(out) - 1) * self.stride + self.reach if out else start)

    def needs(self, out: range, rows: int) -> range:
        """The rows of an image of `rows` rows that are under the windows of these output rows."""
        return common_rows(self.frame(out), range(rows))

    def touched(self, ins: range, outs: int) -> range:
        """The output rows, of `outs` in all, with any of these input rows between a window's first and last.

        It may be empty: with strides longer than the kernel, rows lie between windows.
        """
        first = -((self.reach - 1 - ins.start - self.padding) // self.stride)  # rounded up
        last = (ins.stop - 1 + self.padding) // self.stride
        return common_rows(range(first, last + 1 if ins else first), range(outs))


def common_rows(rows: range, image: range) -> range:
    """The rows that lie in the image; where none do, an empty range that lies in it too."""
    start = min(max(rows.start, image.start), image.stop)
    return range(start, max(start, min(rows.stop, image.stop)))
