"""The tile table of a GPU, from `tables/`: each operation's tile by shape, and whether TMA copies for it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import torch

from lockstep.errors import SpecError
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import Tile
from lockstep.kernels.triton.conv.tma_box import takes_boxes

_TABLES = Path(__file__).parent / "tables"
_HOPPER = 9, 0  # the first compute capability with TMA
_BOX_PROGRAMS = 512  # of a weight gradient with boxes; a multiprocessor holds one or two of them
_PROGRAMS = 2048  # of other weight gradients; more parts would only lengthen the sum over parts
_HALVES = ("bf16", "fp16")
OPERATIONS = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Table:
    """Tiles by key; a missing key gets its tile from `tile_rule`, with boxes if the device has TMA."""

    entries: Mapping[str, Tile] = field(default_factory=dict)
    boxes: bool = True

    def digest(self, layers: Sequence[Layer], precision: str) -> str:
        """A short hash of the tiles that these layers use."""
        used = [
            {name: astuple(tile) for name, tile in self.tiles(layer, precision).items()} for layer in layers
        ]
        return hashlib.sha256(json.dumps(used).encode()).hexdigest()[:16]

    def tiles(self, layer: Layer, precision: str) -> dict[str, Tile]:
        """A tile for each operation of a layer."""
        return {
            name: self.entries.get(tile_key(name, layer, precision))
            or tile_rule(name, layer, precision, self.boxes)
            for name in OPERATIONS
        }


def find_table(device: torch.device, path: Path | None = None) -> Table:
    """The table in a file, or the one that ships with the project for this device."""
    boxes = moves_boxes(device)
    if path is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        path = _TABLES / f"{name.lower().replace(' ', '-')}.toml"
        if not path.is_file():
            return Table(boxes=boxes)
    try:
        rows = tomllib.loads(path.read_text())
        tiles = {name: _read(numbers) for name, numbers in rows["tiles"].items()}
        pooled = {
            name: tile for name, tile in tiles.items() if name.startswith("forward") and "pool2" in name
        }
        if small := [name for name, tile in pooled.items() if tile.rows < 32]:
            raise ValueError(f"{small[0]}: a tile with pooling needs at least 32 rows")
        return Table(tiles, boxes)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"kernels.table={path}: no table of tiles: {error}") from None


def moves_boxes(device: torch.device) -> bool:
    """Whether to use boxes on this device: a GPU without TMA can compute with them, but slowly."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _HOPPER


def _read(numbers: list[int]) -> Tile:
    """A tile from its numbers: rows, columns, depth; optionally warps, stages, parts, and 1 for boxes."""
    sizes = [*map(int, numbers)]
    if sizes[6:] not in ([], [0], [1]):
        raise ValueError(f"{sizes[6:]} after the first six numbers of a tile must be 0 or 1, for boxes")
    return Tile(*sizes[:6], boxes=sizes[6:] == [1])


def tile_key(operation: str, layer: Layer, precision: str) -> str:
    """The key of a tile in the table."""
    kh, kw = layer.kernel
    shape = f"{layer.height}x{layer.width}x{layer.in_channels}-{layer.out_channels}"
    stride = f" stride{layer.stride}" if layer.stride > 1 else ""
    kind = "bf16" if precision in _HALVES else precision  # tiles are of bytes, not of types
    return f"{operation} {shape} {kh}x{kw}{stride} pool{layer.pool} {kind}"


def tile_rule(operation: str, layer: Layer, precision: str, boxes: bool = True) -> Tile:
    """The tile for shapes that are not in the table: powers of two near the shapes, up to a useful size.

    There are no matrix units for IEEE fp32. Its products are unrolled, so a large tile takes minutes to
    compile.
    """
    ci, co = layer.in_channels, layer.out_channels
    rows, cols, deepest = (64, 32, 16) if precision == "fp32" else (128, 64, 64)
    if boxes and precision in _HALVES and (found := _in_boxes(operation, layer)):
        return found
    if operation == "forward":
        return Tile(rows, _near(co, 16, cols), _divisor(ci, layer.depth, deepest))
    if operation == "input_grad":
        return Tile(rows, _near(ci, 16, cols), _divisor(co, layer.depth // ci * co, deepest))
    tile = Tile(_near(co, 16, rows), _near(layer.depth, 16, cols), deepest)
    parts = 1 if layer.height * layer.width == 1 else 64 if layer.depth > 64 else 1024
    programs = -(-co // tile.rows) * -(-layer.depth // tile.cols)
    return replace(tile, parts=min(parts, 1 << max(_PROGRAMS // programs, 1).bit_length() - 1))


def _in_boxes(operation: str, layer: Layer) -> Tile | None:
    """A tile with boxes, if channels are multiples of 64 and the boxes fit the images; else None."""
    ci, co = layer.in_channels, layer.out_channels
    if ci % 64 or co % 64:
        return None
    if operation == "weight_grad":
        rows = 128 if co % 128 == 0 else 64
        programs = layer.depth // 64 * (co // rows) // (3 if layer.kernel[1] == 3 else 1)
        parts = 1 << max(_BOX_PROGRAMS // programs, 1).bit_length() - 1
        tile = Tile(rows, 64, 64, warps=rows // 16, stages=4, parts=parts, boxes=True)
    else:
        wide = (co if operation == "forward" else ci) % 128 == 0
        size = (256, 128, 64, 8, 3) if wide else (256, 64, 64, 4, 2)
        tile = Tile(*size, boxes=True)
    return tile if takes_boxes(operation, layer, tile) else None


def _near(size: int, least: int, most: int) -> int:
    return min(max(1 << (size - 1).bit_length(), least), most)


def _divisor(channels: int, depth: int, most: int) -> int:
    """The depth to load at a time: within one tap if the number of channels allows it."""
    for step in (64, 32, 16):
        if channels % step == 0 and step <= most:
            return step
    return _near(depth, 16, min(most, 32))
