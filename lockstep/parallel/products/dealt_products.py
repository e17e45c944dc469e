"""The products of a run's kernels dealt to the workers of a lane: what of them is cut, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.comm.mesh import Mesh
from lockstep.comm.tree import subtrees
from lockstep.kernels.triton.compile_ahead import compile_ahead
from lockstep.lower.compiled.compiled_program import CompiledProgram
from lockstep.lower.fused.dealt_network import DealtNetwork
from lockstep.lower.layer_split import GRADIENTS
from lockstep.lower.program import DeviceLowering
from lockstep.parallel.device_pipeline import DevicePipeline
from lockstep.parallel.products.channel_workers import ChannelWorkers
from lockstep.parallel.products.product_probe import cut_layers
from lockstep.parallel.split.layer_clock import STEP
from lockstep.parallel.split.layer_report import share_of

Row = dict[str, Any]
_MEASURED = ("busy_s", "channel_mb", "spatial_mb", "exchange_s")


@dataclass
class DealtProducts:
    """The workers of a lane, and a row for each layer of all stages: rule, work, and what of it is cut."""

    workers: ChannelWorkers
    rows: list[Row]
    timed: str

    def tell(self) -> str:
        """One line about what is cut and what not."""
        less = [row["layer"] for row in self.rows if row["share"] < 1]
        share, size = 100 * share_of(self.rows), self.workers.size
        line = f"{share:.0f} % of the multiplications are cut over channel={size}"
        if not less:
            return f"{line}: all {len(self.rows)} layers"
        are = "is" if len(less) == 1 else "are"
        return f"{line}; {len(less)} of {len(self.rows)} layers {are} not, only in part, or unevenly"

    def measured(self) -> dict[str, Row]:
        """What this worker measured, by layer and for a step."""
        clock, found = self.workers.clock, {}
        for (axis, layer), seen in clock.traffic.items():
            steps = max(clock.steps, 1)
            found[layer] = {
                "busy_s": 0.0,
                f"{axis}_mb": round(seen.num_bytes / steps / 1e6, 6),
                "spatial_mb": 0.0,
                "exchange_s": round(seen.seconds / steps, 6),
            }
        busy_s = clock.busy_s.get(STEP, 0.0) / max(clock.steps, 1)
        return {**found, STEP: {"busy_s": round(busy_s, 6)}}

    def summarize(self, workers: Sequence[Mapping[str, Row]]) -> Row:
        """What `summary.json` has, from what all workers measured."""
        rows = []
        for row in (*self.rows, {"layer": GRADIENTS}):
            seen = [own[row["layer"]] for own in workers if row["layer"] in own]
            rows.append({**row, **{key: max((own[key] for own in seen), default=0.0) for key in _MEASURED}})
        exchange_s = max(sum(row.get("exchange_s", 0.0) for row in own.values()) for own in workers)
        return {
            "share": round(share_of(self.rows), 4),
            "timed": self.timed,
            "busy_s": max(own[STEP]["busy_s"] for own in workers),
            "exchange_s": round(exchange_s, 6),
            "rows": rows,
        }


def deal_products(
    lowering: DeviceLowering, own: range, mesh: Mesh, pipeline: DevicePipeline | None
) -> DealtProducts:
    """Deal the products of a model, or of a stage of it, out along `channel`; `own` are the lanes of a step.

    A collective.
    """
    workers = ChannelWorkers(mesh.channel)
    part = pipeline.whole.part(pipeline.own) if pipeline else None
    if lowering.is_fused:
        mine = _deal_fused(part.part_network() if part else lowering.network(len(own)), workers)
    else:
        mine = _deal_compiled(part or lowering, range(1) if part else own, workers)
    told = mesh.world.all_gather_bytes(json.dumps(mine).encode())
    rows = {row["layer"]: row for own in told for row in json.loads(own)}
    return DealtProducts(
        workers, list(rows.values()), "launches" if lowering.device.type == "cuda" else "work"
    )


def _deal_fused(network: Any, workers: ChannelWorkers) -> list[Row]:
    """Deal tiles out; compile this worker's kernels all at once, instead of one by one while others wait."""
    assert isinstance(network, DealtNetwork)
    network.share_with(workers)
    if network.labels.is_cuda:
        workers.is_silent = True
        try:
            compile_ahead(network.compute)
        finally:
            workers.is_silent = False
    return network.product_rows()


def _deal_compiled(lowering: DeviceLowering, own: range, workers: ChannelWorkers) -> list[Row]:
    """Deal channels out, as far as kernels keep their bits; lanes run in the subtrees of `own`."""
    program = lowering.program
    assert isinstance(program, CompiledProgram)
    one_by_one = lowering.train.wire != "fp32"
    at_once = {1} if one_by_one else {1 << height for _, height in subtrees(own)}
    return cut_layers(program.model, lowering.train, workers, at_once, lowering.device)
