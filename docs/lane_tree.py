"""Draws lane-tree.png: eight lanes, three workers, and the sums that travel. Run: python docs/lane_tree.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from lockstep.comm.tree import subtrees, worker_lanes

LANES, WORKERS = 8, 3
COLORS = ("#2a6f97", "#c8553d", "#588157")


def main() -> None:
    figure, axes = plt.subplots(figsize=(9, 4.6))
    own = [worker_lanes(LANES, WORKERS, rank) for rank in range(WORKERS)]
    roots = {tree for lanes in own for tree in subtrees(lanes)}
    for height in range(LANES.bit_length()):
        for first in range(0, LANES, 1 << height):
            draw_node(axes, first, height, own, roots)
    for rank, lanes in enumerate(own):
        middle = (lanes.start + lanes.stop - 1) / 2
        axes.text(
            middle, -0.78, f"worker {rank}", ha="center", color=COLORS[rank], fontsize=12, weight="bold"
        )
        axes.plot([lanes.start - 0.3, lanes.stop - 0.7], [-0.52, -0.52], color=COLORS[rank], lw=4)
    notes = "a ring: this sum goes to other workers, rounded to the wire type like every node\n"
    notes += "grey: added by the worker that owns the slice, in this order"
    axes.text(-0.6, 4.15, notes, fontsize=10, va="top", color="#333333")
    axes.set_xlim(-0.8, LANES - 0.2)
    axes.set_ylim(-1.0, 4.2)
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("lane-tree.png"), dpi=130, bbox_inches="tight")


def draw_node(axes, first, height, own, roots):
    """One node, and the lines to its two halves; in its worker's colour if one worker sums it."""
    count = 1 << height
    x, y = first + (count - 1) / 2, height
    mine = [rank for rank, lanes in enumerate(own) if first in lanes and first + count - 1 in lanes]
    color = COLORS[mine[0]] if mine else "#9a9a9a"
    if height:
        for half in (first, first + count // 2):
            axes.plot([half + (count / 2 - 1) / 2, x], [y - 1, y], color=color, lw=1.6, zorder=1)
    ring = (first, height) in roots
    axes.scatter([x], [y], s=420, color="white" if ring else color, edgecolors=color, linewidths=3, zorder=2)
    label = f"{first}" if not height else f"{first}–{first + count - 1}"
    axes.text(x, y, label, ha="center", va="center", fontsize=9, color=color if ring else "white", zorder=3)


if __name__ == "__main__":
    main()
