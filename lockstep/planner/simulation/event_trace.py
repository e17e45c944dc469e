"""Events of a simulated step, and the same as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ROWS = {"exchange": "gradients", "send": "stages"}  # what travels beside computing has rows of its own


@dataclass(frozen=True)
class StepEvent:
    """What a worker does, or its link for it, from when to when."""

    worker: int
    kind: str  # forward, backward, inside, send, exchange, update, gather, host, data
    label: str  # the lane or bucket; empty if there is one
    start_s: float
    end_s: float


def to_chrome(events: Iterable[StepEvent]) -> dict[str, Any]:
    """A Chrome trace, to be written as JSON: a process for each worker, a row for each of its links."""
    names = ["computing", *ROWS.values()]
    found = sorted(events, key=lambda event: (event.worker, event.start_s))
    rows: list[dict[str, Any]] = []
    for worker in sorted({event.worker for event in found}):
        rows.append({"ph": "M", "pid": worker, "name": "process_name", "args": {"name": f"worker {worker}"}})
        rows += [
            {"ph": "M", "pid": worker, "tid": number, "name": "thread_name", "args": {"name": name}}
            for number, name in enumerate(names)
        ]
    for event in found:
        rows.append(
            {
                "ph": "X",
                "pid": event.worker,
                "tid": names.index(ROWS.get(event.kind, "computing")),
                "name": f"{event.kind} {event.label}".strip(),
                "cat": event.kind,
                "ts": 1e6 * event.start_s,
                "dur": 1e6 * (event.end_s - event.start_s),
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": rows}
