"""Draws the pictures of the laboratory's pages from their records: python docs/lab_pictures.py"""

from __future__ import annotations

from pathlib import Path

from lockstep.report.ladder_picture import draw_ladder
from lockstep.spec.record import read_records

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"


def draw_gemm(record: str, picture: str) -> None:
    """The ladder, a bar for every size."""
    rates = dict[str, dict[str, float]]()
    for each in read_records(RESULTS / record):
        rung, size, precision, _ = each.name.rsplit(", ", 3)
        name = f"{rung}, {precision}" if rung in {"cuBLAS", "Triton"} else rung
        rates.setdefault(name, {})[size] = each.details["gflop_s"]
    sizes = list(dict.fromkeys(size for found in rates.values() for size in found))
    draw_ladder(HERE / picture, sizes, rates, [name for name in rates if name.startswith("cuBLAS")])


if __name__ == "__main__":
    draw_gemm("lab-gemm-gpu.json", "lab-gemm.png")
