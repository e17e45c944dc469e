"""How near each operation of a fused network comes to what the GPU can do.

Two ceilings are measured first: bytes by a large copy, products by a large matrix product. For each operation
the fewest bytes it must move and the products it must do are counted from its shapes; the larger of the
two times is the limit, and its share of the measured time is the fraction. An operation is timed as a CUDA
graph, as in a step, with nothing of its data in the GPU's cache.

python benchmarks/roofline.py --model emotion48 --batch 1024 --lanes 8
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from gpu_step import MODELS
from measure import RESULTS, make_parser, make_record
from rich.console import Console
from rich.table import Table as Sheet
from triton.testing import do_bench

from lockstep.kernels.cuda_graph import capture
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile_table import OPERATIONS, find_table
from lockstep.lower.flat_table import KernelNetwork
from lockstep.lower.fused.chain_program import find_chain
from lockstep.lower.fused.residual_network import ResidualNetwork
from lockstep.lower.fused.residual_program import find_residual
from lockstep.models import build
from lockstep.spec import Train
from lockstep.spec.record import Record, write_records

WIDTH = {"bf16": 2, "tf32": 4, "fp32": 4}


def main() -> None:
    parser = make_parser(__doc__, RESULTS / "roofline.json")
    parser.add_argument("--model", default="emotion48", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--precision", default="bf16", choices=tuple(WIDTH))
    options = parser.parse_args()
    in_channels, size, num_classes = MODELS[options.model]
    model = build(
        options.model, in_channels=in_channels, num_classes=num_classes, image_size=(size, size), options={}
    )
    shape = in_channels, size, size
    form = find_chain(model, shape) or find_residual(model, shape)
    if form is None:
        parser.error(f"{options.model} has no fused kernels for {size}x{size} pixels")
    train = Train(batch=options.batch, lanes=options.lanes, precision=options.precision)
    device = torch.device("cuda")
    network = form.make(train.lanes, train, device, find_table(device))
    assert isinstance(network, KernelNetwork)
    network.x[0].normal_()
    network.copy.normal_(std=0.05)
    network.weights.normal_(mean=1.0, std=0.1)  # norms: with factors of zero all would be zero, and faster
    network.labels.random_(num_classes)
    network.forward()
    network.backward()
    bytes_s, flop_s = ceilings(options.precision)
    records = [
        measure(network, operation, i, train, (bytes_s, flop_s))
        for i in range(len(form.layers))
        for operation in operations(network, i)
    ]
    Console(width=110).print(sheet(records, bytes_s, flop_s))
    write_records(options.output, records)


def operations(network: KernelNetwork, i: int) -> list[str]:
    """Of a layer; the norm's gradient last, since it writes where it reads."""
    found = [name for name in OPERATIONS if i or name != "input_grad"]
    has_norm = isinstance(network, ResidualNetwork) and i < len(network.layers) - 1
    return [*found, "norm", "norm_grad"] if has_norm else found


def launch(network: KernelNetwork, operation: str, i: int) -> Callable[[], object]:
    if operation in OPERATIONS:
        return lambda: network.run(operation, i)
    method: Callable[[int], None] = getattr(network, operation)
    return lambda: method(i)


def ceilings(precision: str) -> tuple[float, float]:
    """Bytes and operations a second that this GPU reaches."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    copy_s = milliseconds(lambda: other.copy_(big)) / 1e3
    side = 8192
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    a, b = (torch.randn(side, side, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * big.numel() / copy_s, 2 * side**3 / (milliseconds(lambda: a @ b) / 1e3)


def milliseconds(compute: Callable[[], object]) -> float:
    return float(do_bench(compute, warmup=10, rep=50, return_mode="median"))


def measure(
    network: KernelNetwork, operation: str, i: int, train: Train, ceiling: tuple[float, float]
) -> Record:
    """One operation: its time, and how much of it is the limit."""
    layer, compute = network.layers[i], launch(network, operation, i)
    moved = traffic(operation, layer, train)
    done = work(layer, train.batch) if operation in OPERATIONS else 0.0
    compute()
    replay = capture(compute, network.weights.device, graph=True)
    values = [milliseconds(replay) * 1e3 for _ in range(5)]
    limit_us = 1e6 * max(moved / ceiling[0], done / ceiling[1])
    name = f"{operation} of layer {i}: {layer.height}x{layer.width}x{layer.in_channels}-{layer.out_channels}"
    record = make_record(name, values, "us", bytes=moved, flop=done, limit_us=round(limit_us, 2))
    record.details["fraction"] = round(limit_us / record.value, 3)
    record.details["bound"] = "bytes" if moved / ceiling[0] > done / ceiling[1] else "products"
    return record


def work(layer: Layer, samples: int) -> float:
    """Operations of any of the three: each product once, with its sum."""
    return 2.0 * samples * prod(layer.conv_size) * layer.depth * layer.out_channels


def traffic(operation: str, layer: Layer, train: Train) -> float:
    """The fewest bytes: each input read once, each output written once; borders are not counted."""
    width, samples = WIDTH[train.precision], train.batch
    seen = layer.height * layer.width * layer.in_channels * width
    (oh, ow), (kh, kw) = layer.conv_size, layer.kernel  # a stride may pass over pixels
    read = min(layer.height, oh * kh) * min(layer.width, ow * kw) * layer.in_channels * width
    given = prod(layer.out_shape) * (width + (layer.pool > 1))
    full = prod(layer.conv_size) * layer.out_channels * width
    weights = layer.depth * layer.out_channels
    if operation == "forward":
        return samples * (read + given) + weights * width
    if operation == "input_grad":
        return samples * (full + seen) + weights * width
    if operation == "norm":
        return samples * 2 * full  # a residual is not counted
    if operation == "norm_grad":
        return samples * 3 * full
    return samples * (read + full) + weights * 4 * train.lanes


def sheet(records: list[Record], bytes_s: float, flop_s: float) -> Sheet:
    found = Sheet(title=f"ceilings: {bytes_s / 1e12:.2f} TB/s, {flop_s / 1e12:.0f} TFLOP/s")
    for column in ("operation", "µs", "limit, µs", "fraction", "bound by", "TB/s", "TFLOP/s"):
        found.add_column(column, justify="left" if column == "operation" else "right")
    for record in records:
        facts, seconds = record.details, record.value / 1e6
        found.add_row(
            record.name,
            f"{record.value:.1f}",
            f"{facts['limit_us']:.1f}",
            f"{facts['fraction']:.2f}",
            facts["bound"],
            f"{facts['bytes'] / seconds / 1e12:.2f}",
            f"{facts['flop'] / seconds / 1e12:.0f}",
        )
    time = sum(record.value for record in records)
    limit: float = sum(record.details["limit_us"] for record in records)
    found.add_section()
    found.add_row("all of them", f"{time:.0f}", f"{limit:.0f}", f"{limit / time:.2f}")
    return found


if __name__ == "__main__":
    main()
