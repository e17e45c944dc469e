"""Reads `train.compress`: how gradients are made smaller before they travel, and which of them are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from lockstep.errors import SpecError

BLOCK = 1 << 12  # elements of a parameter that are compressed together, counted from its first one
SUM_BYTES = 4 * BLOCK  # of a block of a sum over lanes, which travels in fp32
KINDS = ("none", "bf16", "fp8", "int8", "top:SHARE", "rank:NUMBER")
_MOST_SHARE, _MOST_RANK = 0.25, 64


@dataclass(frozen=True)
class Compression:
    """A way to compress: its kind, and for `top` the share of elements, for `rank` the rank."""

    kind: str
    amount: float = 0.0

    @property
    def rank(self) -> int:
        """Of `rank:NUMBER`; 0 for the other kinds, which compress block by block."""
        return int(self.amount) if self.kind == "rank" else 0

    @property
    def count(self) -> int:
        """The elements of a block that `top` keeps; 0 for the other kinds."""
        return max(1, ceil(self.amount * BLOCK - 1e-9)) if self.kind == "top" else 0

    @property
    def row_bytes(self) -> int:
        """Of a block as it travels, for the kinds that compress block by block."""
        if self.kind == "top":
            return (2 + 4) * self.count  # places and values
        return 2 * BLOCK if self.kind == "bf16" else 4 + BLOCK  # a scale for each block

    def travels_packed(self, height: int) -> bool:
        """Whether the sum over a subtree of lanes travels as their rows, where those are smaller."""
        return self.row_bytes << height < SUM_BYTES

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a parameter is compressed: no norms, biases and others of less than a block.

        By rank only where the factors are less than half of the matrix.
        """
        size = prod(shape)
        if len(shape) < 2 or size < BLOCK:
            return False
        return not self.rank or 2 * self.rank * (shape[0] + size // shape[0]) <= size

    def feedback_bytes(self, shapes: Sequence[Sequence[int]], lanes: int) -> int:
        """What the workers keep together for the lanes, and by blocks for their mean."""
        return 4 * (lanes + (not self.rank)) * sum(prod(shape) for shape in shapes if self.takes(shape))


def own_blocks(count: int, index: int, workers: int, rank: int) -> range:
    """The blocks of parameter number `index`, of all that are compressed, that a worker sums."""
    place = (rank + index) % workers  # so that not always the same worker has what is left over
    return range(count * place // workers, count * (place + 1) // workers)


def read_compression(text: str) -> Compression | None:
    """What `train.compress` says; None for `none`."""
    kind, colon, amount = text.partition(":")
    if not colon and kind in ("none", "bf16", "fp8", "int8"):
        return Compression(kind) if kind != "none" else None
    try:
        number = float(amount)
    except ValueError:
        number = -1.0
    if kind == "top" and 0 < number <= _MOST_SHARE:
        return Compression("top", number)
    if kind == "rank" and number in range(1, _MOST_RANK + 1):
        return Compression("rank", number)
    if kind == "top":
        rule = f"takes the share of elements that travels, above 0 and at most {_MOST_SHARE:g}, as top:0.01"
    elif kind == "rank":
        rule = f"takes the rank of what travels, a whole number from 1 to {_MOST_RANK}, as rank:4"
    else:
        rule = f"must be one of {', '.join(KINDS)}"
    raise SpecError(f"train.compress={text} {rule}")


def check_compression(text: str, after: int, wire: str) -> None:
    """Refuse what `train.compress` cannot be, alone and beside other keys."""
    compression = read_compression(text)
    if after < 0:
        raise SpecError(f"train.compress_after={after} must be 0 or more epochs that are not compressed")
    if compression is None and after:
        raise SpecError(f"train.compress_after={after} needs train.compress: {', '.join(KINDS[1:])}")
    if compression and wire != "fp32":
        raise SpecError(f"train.wire={wire} does not go with train.compress={text}: leave one of them out")


def explain_compression(text: str, shapes: Sequence[Sequence[int]], lanes: int) -> list[str]:
    """How many parameters of these shapes are compressed, and how much memory that takes."""
    compression = read_compression(text)
    if not compression:
        return []
    taken = sum(map(compression.takes, shapes))
    if not taken:
        return [f"train.compress={text} changes nothing: no parameter is large enough for it"]
    kept = compression.feedback_bytes(shapes, lanes) / 1e6
    return [
        f"train.compress={text}: {taken} of {len(shapes)} tensors of parameters travel compressed; what that "
        f"leaves out is remembered by lane, in {kept:,.1f} MB over all workers, and as much again in a step"
    ]
