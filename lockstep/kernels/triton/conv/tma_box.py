"""The boxes of pixels that TMA copies: which images, rows and columns a convolution's tile covers."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import Tile

LEAST = 128  # the fewest pixels of a box that `lockstep bench tune` tries


@dataclass(frozen=True)
class Box:
    """The number of images, rows and columns in a tile of pixels."""

    images: int
    rows: int
    cols: int

    def is_run(self, height: int, width: int) -> bool:
        """Whether its pixels are contiguous in images of this height and width."""
        return (self.cols == width or self.images * self.rows == 1) and (
            self.rows == height or self.images == 1
        )


def find_box(pixels: int, height: int, width: int) -> Box:
    """A box of this many pixels that divides the images evenly: as wide as possible, then as high."""
    cols = min(width & -width, pixels)
    rows = min(height & -height, pixels // cols)
    return Box(pixels // cols // rows, rows, cols)


def takes_boxes(
    operation: str, layer: Layer, tile: Tile, lane_size: int | None = None, chunks: int = 1
) -> bool:
    """Whether boxes of this tile fit the layer; a weight gradient's boxes must also fit a lane's chunks."""
    (high, wide), ci, co, stride = layer.conv_size, layer.in_channels, layer.out_channels, layer.stride
    if stride > 2 or layer.height % stride or layer.width % stride or not layer.is_plain:
        return False  # with stride 2 the sides must be even; a border, equal on both sides, keeps them so
    if ci % 8 or co % 8:
        return False  # TMA copies multiples of 16 bytes
    if operation == "forward":
        return co % tile.cols == 0 and ci % tile.depth == 0
    if operation == "input_grad":
        return ci % tile.cols == 0 and co % tile.depth == 0
    box = find_box(tile.depth, high, wide)
    whole = lane_size is None or lane_size % (chunks * box.images) == 0
    return whole and box.is_run(high, wide) and co % tile.rows == 0 and ci % tile.cols == 0


def holds_lanes(operation: str, layer: Layer, tile: Tile, lane_size: int) -> bool:
    """Whether every box has images of one lane only, so that a sum over a box belongs to that lane."""
    high, wide = layer.conv_size
    if operation == "input_grad":
        high, wide = layer.height // layer.stride, layer.width // layer.stride
    return lane_size % find_box(tile.rows, high, wide).images == 0


def neighbours(layer: Layer, tile: Tile) -> int:
    """How many neighbouring taps one program computes: 3 if their sums fit into registers, else 1."""
    return 3 if layer.kernel[1] == 3 and tile.rows * tile.cols <= 64 * 32 * tile.warps else 1
