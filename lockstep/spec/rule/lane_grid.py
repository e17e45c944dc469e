"""How sums are cut in a run: lanes, bands of rows and slices of outputs; each a power of two."""

from __future__ import annotations

from lockstep.errors import SpecError
from lockstep.spec.field import require

_MOST_CELLS = 64  # of a grid


def check_cuts(lanes: int, bands: int, slices: int, recompute: bool) -> None:
    """Refuse numbers that no tree sums evenly."""
    for name, value in (("lanes", lanes), ("bands", bands), ("slices", slices)):
        key, is_fine = f"train.{name}", name == "lanes" or value <= _MOST_CELLS
        require(is_fine, key, value, f"must be at most {_MOST_CELLS}")
        power = 1 << (value.bit_length() - 1)
        require(value == power, key, value, f"must be a power of two: use {power} or {2 * power}")
    rule = f"does not go with train.bands={bands} and train.slices={slices}, whose layers run one by one"
    require(not recompute or bands == slices == 1, "train.recompute", "true", f"{rule}: leave it out")


def check_grid(bands: int, slices: int, kernels: str) -> None:
    """Refuse kernels that sum over all pixels and outputs at once."""
    if max(bands, slices) > 1 and kernels in ("fused", "compiled"):
        raise SpecError(
            f"train.bands={bands}, train.slices={slices}: {kernels} kernels have no such grid: use "
            "kernels.set=stock, which is another run"
        )
