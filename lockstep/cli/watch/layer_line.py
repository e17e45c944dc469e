"""The line of a finished run about layers over several workers."""

from __future__ import annotations

from typing import Any


def describe_layers(layers: dict[str, Any]) -> str:
    """One line for layers over several workers: what is cut, and what the exchanges cost."""
    sent = {"rows": 0.0, "channels": 0.0, "gradients": 0.0}
    for row in layers["rows"]:
        is_last = row["layer"] == "gradients"
        sent["gradients" if is_last else "rows"] += row["spatial_mb"]
        sent["gradients" if is_last else "channels"] += row["channel_mb"]
    parts = [f"{name} {mb:.2f} MB" for name, mb in sent.items() if mb]
    spent, busy, share = layers["exchange_s"], layers["busy_s"], 100 * layers["share"]
    kind = " to launch" if layers["timed"] == "launches" else ""
    return (
        f"{share:.0f} % of the multiplications are cut; exchanges took {spent:.3f} s a step{kind} "
        f"beside {busy:.3f} s of computing ({100 * spent / max(spent + busy, 1e-9):.0f} %): "
        f"{', '.join(parts) or 'nothing'} sent a step"
    )
