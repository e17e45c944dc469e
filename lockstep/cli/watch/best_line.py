"""What the lines of a finished run say of its best epoch, and of an end before its last one."""

from __future__ import annotations

from typing import Any


def describe_best(summary: dict[str, Any]) -> str:
    """The best epoch by accuracy, or by the metric that chooses it."""
    if "best_accuracy" in summary:
        return f"best {100 * summary['best_accuracy']:.2f} %, "
    return f"best {summary['best_by']} {summary['best_value']:.4g}, " if "best_value" in summary else ""


def describe_kept(summary: dict[str, Any]) -> str:
    """A line for a run that ended early, or whose last weights are not its best; empty for others."""
    best = summary.get("best_step", -1)
    if stop := summary.get("stopped_early"):
        done, patience = stop["after_epochs"], stop["patience"]
        told = f"stopped after {done} of {stop['of']} epochs: "
        if best < 0:
            return f"{told}no evaluation was finite"
        last = "the last one was" if patience == 1 else f"the last {patience} were"
        told += f"{last} no better than epoch {done - patience}, step {best}, whose weights stay"
    elif 0 <= best < summary["steps"] and summary.get("best_accuracy", -1.0) != summary.get("accuracy"):
        told = f"the best weights are those of step {best}, and stay"
    else:
        return ""
    return f"{told} (--checkpoint best)"
