"""How gradients are clipped: by the norm of all of them (`train.clip`), or by value (`train.clip_value`)."""

from __future__ import annotations

from lockstep.spec.field import require


def check_clip(norm: float, value: float) -> None:
    """Refuse limits below 0, and both at once."""
    require(norm >= 0, "train.clip", norm, "must be 0 (off) or the largest gradient norm")
    require(value >= 0, "train.clip_value", value, "must be 0 (off) or the largest value of a gradient")
    rule = f"does not go with train.clip={norm:g}: clip by the norm or by value, and set the other to 0"
    require(not (norm and value), "train.clip_value", value, rule)
