"""What the lines of a finished run say of its best epoch, and of an end before its last one."""

from __future__ import annotations

from typing import Any


def describe_best(summary: dict[str, Any]) -> str:
    """The best epoch by accuracy, or by the metric that chooses it."""
    if "best_accuracy" in summary:
        return f"best {100 * summary['best_accuracy']:.2f} %, "
    return f"best {summary['best_by']} {summary['best_value']:.4g}, " if "best_value" in summary else ""


def describe_stop(summary: dict[str, Any]) -> str:
    """A line for a run that ended early."""
    stop = summary["stopped_early"]
    done, patience = stop["after_epochs"], stop["patience"]
    told = f"stopped after {done} of {stop['of']} epochs: "
    if summary["best_step"] < 0:
        return f"{told}no evaluation was finite"
    return (
        f"{told}the last {patience} were no better than epoch {done - patience}, step "
        f"{summary['best_step']}, whose weights stay (--checkpoint best)"
    )
