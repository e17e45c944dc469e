"""Convolutions in pieces over random shapes: the error to float64, and the share equal in every bit uncut.

A shape is a layer, normal or transposed, and an image of 7 to 97 rows. It is cut into 2 to 4 bands of rows,
or ranges of channels, and computed on one thread. It counts as equal if its pieces, put together, are one
stock call's. A weight gradient by rows is a sum over bands: it is compared with float64 only. A layer that is
refused is counted by the rule that refuses it, and another one drawn. Every fourth shape is of bf16.

python benchmarks/halo_conv.py --shapes 2400
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from measure import make_parser, make_record
from torch import Tensor, nn

from lockstep.errors import ModelError
from lockstep.parallel.split.layers.conv_piece import ConvForm
from lockstep.spec.record import Record, write_records

Layer = nn.Conv2d | nn.ConvTranspose2d
MOST_WORK = 8e6  # multiplications of a forward pass; a shape beyond is drawn again
FEW_ROWS = 4  # a layer with fewer output rows a band is not cut by rows
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # of the largest number
LIMIT_OF_LOSERS = 8


@dataclass
class Shape:
    """A layer and its image, with what stock kernels make of them."""

    layer: Layer
    form: ConvForm
    x: Tensor
    dy: Tensor
    bands: int
    cuts: int

    def stock(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The output and both gradients, uncut."""
        layer = self.layer.to(dtype)
        x = self.x.detach().to(dtype).requires_grad_()
        y = layer(x)
        dx, dw = torch.autograd.grad(y, (x, layer.weight), self.dy.to(dtype))
        return y.detach(), dx, dw

    def forward(self, bands: int, cuts: int) -> Tensor:
        weight, bias = self.layer.weight.detach(), self.layer.bias
        bias, rows, grid = None if bias is None else bias.detach(), self.x.shape[2], []
        for out in deal(self.dy.shape[2], bands):
            held = self.form.forward_needs(out, rows)
            x = take(self.x, 2, held)
            outs = deal(self.dy.shape[1], cuts)
            grid.append(torch.cat([self.form.forward(x, held, weight, bias, out, own) for own in outs], 1))
        return torch.cat(grid, 2)

    def input_gradient(self, bands: int, cuts: int) -> Tensor:
        weight, (_, channels, rows, width), grid = self.layer.weight.detach(), self.x.shape, []
        for band in deal(rows, bands):
            held = self.form.input_needs(band, self.dy.shape[2])
            dy = take(self.dy, 2, held)
            ins = deal(channels, cuts)
            parts = [self.form.input_gradient(dy, held, weight, band, [own], width) for own in ins]
            grid.append(torch.cat(parts, 1))
        return torch.cat(grid, 2)

    def weight_gradient(self, bands: int, cuts: int) -> Tensor:
        rows, out_rows, shape = self.x.shape[2], self.dy.shape[2], self.layer.weight.shape
        ranges, parts = deal(self.dy.shape[1], cuts), []
        for outs in ranges:
            sums = []
            for band in deal(rows if self.form.transposed else out_rows, bands):
                x_held, dy_held = self.form.weight_needs(band, rows, out_rows)
                dy, x = take(take(self.dy, 2, dy_held), 1, outs), take(self.x, 2, x_held)
                sums.append(self.form.weight_gradient(x, x_held, dy, dy_held, band, outs, shape))
            parts.append(sum(sums[1:], sums[0]))
        return self.form.join_weights(parts, ranges)

    def __str__(self) -> str:
        form, (images, inputs, rows, columns) = self.form, self.x.shape
        kind = "transposed " * form.transposed + "channels_last " * is_last(self.x)
        image = f"{kind}{images}x{inputs}x{rows}x{columns} to {self.dy.shape[1]}"
        numbers = f"kernel {form.kernel}, stride {form.stride}, padding {form.padding}"
        cuts = f"{self.bands} bands or {self.cuts} ranges"
        return f"{image}, {numbers}, dilation {form.dilation}, groups {form.groups}; {cuts}"


class Tally:
    """What was found of one pass, cut and type."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.equal: dict[str, list[bool]] = defaultdict(list)
        self.losers: list[str] = []
        self.far: list[str] = []
        self.num_outside = self.num_uncut_outside = 0

    def add(self, shape: Shape, found: Tensor, uncut: Tensor, true: Tensor) -> None:
        limit = TOLERANCE[found.dtype] * true.abs().max().clamp_min(1e-30)
        self.errors.append(float((found.double() - true).abs().max() / true.abs().max().clamp_min(1e-30)))
        outside, uncut_outside = (bool((one.double() - true).abs().max() > limit) for one in (found, uncut))
        self.num_outside += outside
        self.num_uncut_outside += uncut_outside
        if outside or uncut_outside:
            self.far.append(
                f"{shape}{' (uncut too)' * (outside and uncut_outside)}{' (uncut only)' * (not outside)}"
            )
        same = torch.equal(found, uncut)
        out_rows = shape.x.shape[2] if shape.form.transposed else shape.dy.shape[2]
        groups, channels = shape.form.groups, min(shape.x.shape[1], shape.dy.shape[1])
        kinds = {
            "normal": not shape.form.transposed,
            "transposed": shape.form.transposed,
            "contiguous": not is_last(shape.x),
            "channels_last": is_last(shape.x),
            "one image": len(shape.x) == 1,
            "several images": len(shape.x) > 1,
            f"{FEW_ROWS} rows a band or more": out_rows // shape.bands >= FEW_ROWS,
            "one group": groups == 1,
            "one group, 4 channels a range or more": groups == 1 and channels // shape.cuts >= 4,
            "groups, cut between them": groups > 1 and not groups % shape.cuts,
            "groups, cut inside": groups % shape.cuts > 0 and groups > 1,
        }
        for kind in ["all", *(kind for kind, holds in kinds.items() if holds)]:
            self.equal[kind].append(same)
        if not same and len(self.losers) < LIMIT_OF_LOSERS:
            self.losers.append(str(shape))

    def records(self, name: str, has_bits: bool) -> list[Record]:
        error = make_record(
            f"{name}: error to float64",
            self.errors,
            "of the largest",
            outside=self.num_outside,
            uncut_outside=self.num_uncut_outside,
            far=self.far[:LIMIT_OF_LOSERS],
        )
        if not has_bits:
            return [error]
        values = [100.0 * same for same in self.equal["all"]]
        shares = {kind: round(100 * statistics.mean(same), 2) for kind, same in sorted(self.equal.items())}
        counts = {f"n, {kind}": len(same) for kind, same in sorted(self.equal.items())}
        details = {**shares, **counts, "some that differ": self.losers}
        record = make_record(f"{name}: shapes equal in every bit to the uncut call", values, "%", **details)
        return [replace(record, value=statistics.mean(values)), error]


def main() -> None:
    parser = make_parser(__doc__, "halo-conv-cpu.json")
    parser.add_argument("--shapes", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, refused = random.Random(options.seed), Counter[str]()
    torch.manual_seed(options.seed)
    tallies: dict[tuple[str, bool], Tally] = defaultdict(Tally)
    for number in range(options.shapes):
        dtype = torch.bfloat16 if number % 4 == 3 else torch.float32
        compare(next_shape(draw, dtype, refused), dtype, tallies)
    records = [made for (name, bits), tally in tallies.items() for made in tally.records(name, bits)]
    count = sum(refused.values())
    records.append(make_record("layers refused while drawing", [count], "layers", **refused))
    for record in sorted(records, key=lambda record: record.name):
        print(
            f"{record.name}: {record.value:.4g} {record.unit} {record.spread}, n {record.n} {record.details}"
        )
    write_records(options.output, records)


def compare(shape: Shape, dtype: torch.dtype, tallies: dict[tuple[str, bool], Tally]) -> None:
    """Every pass, cut by rows and by channels."""
    true = shape.stock(torch.float64)
    uncut = shape.stock(dtype)  # the layer has this type again
    passes: dict[str, Callable[[int, int], Tensor]] = {
        "forward": shape.forward,
        "gradient of the input": shape.input_gradient,
        "gradient of the weight": shape.weight_gradient,
    }
    for (name, work), one, exact in zip(passes.items(), uncut, true, strict=True):
        for cut, numbers in {"rows": (shape.bands, 1), "channels": (1, shape.cuts)}.items():
            has_bits = cut == "channels" or name != "gradient of the weight"
            title = f"{name} by {cut}, {str(dtype).removeprefix('torch.')}"
            tallies[title, has_bits].add(shape, work(*numbers), one, exact)


def next_shape(draw: random.Random, dtype: torch.dtype, refused: Counter[str]) -> Shape:
    """A layer that can be computed in pieces; one that cannot is counted."""
    while True:
        layer = make_layer(draw).to(dtype)
        images, rows, columns = draw.choice([1, 2, 4]), draw.randint(7, 97), draw.randint(7, 24)
        try:
            form = ConvForm.of(layer)
        except ModelError as error:
            refused[str(error).partition("cannot be cut: ")[2]] += 1
            continue
        out = (
            form.out_rows(rows),
            replace(form, kernel=form.kernel[::-1], padding=form.padding[::-1]).out_rows(columns),
        )
        if min(out) < 1:
            refused["the kernel is larger than the padded image, or all output is padding: no output"] += 1
            continue
        pixels = rows * columns if form.transposed else out[0] * out[1]
        if images * pixels * layer.weight.numel() > MOST_WORK:
            continue
        last = torch.channels_last if draw.random() < 0.5 else torch.contiguous_format
        layer = layer.to(memory_format=last)  # type: ignore[call-overload]
        x, dy = (
            torch.randn(images, *size, dtype=dtype)
            for size in ((layer.in_channels, rows, columns), (layer.out_channels, *out))
        )
        x, dy = x.contiguous(memory_format=last), dy.contiguous(memory_format=last)
        return Shape(layer, form, x, dy, draw.randint(2, 4), draw.randint(2, 4))


def make_layer(draw: random.Random) -> Layer:
    """Kernel 1–11, stride 1–4, padding 0–5, dilation 1–3, several groups or one; a few with odd padding."""
    kernel = tuple(draw.choice([1, 2, 3, 3, 4, 5, 7, 11]) for _ in range(2)) if draw.random() < 0.2 else None
    kernel = kernel or (draw.randint(1, 11),) * 2
    stride, dilation = draw.choice([1, 1, 2, 2, 3, 4]), draw.choice([1, 1, 1, 2, 3])
    groups = draw.choice([1, 1, 1, 2, 3, 4])
    inputs, outputs = (groups * draw.choice([1, 2, 3, 5, 8, 12, 16, 32]) for _ in range(2))
    numbers = {"stride": stride, "dilation": dilation, "groups": groups, "bias": draw.random() < 0.5}
    kind = draw.random()
    if kind < 0.35:
        more = draw.randrange(max(stride, dilation))
        padding = draw.randint(0, 5)
        return nn.ConvTranspose2d(inputs, outputs, kernel, padding=padding, output_padding=more, **numbers)
    if kind < 0.4:
        return nn.Conv2d(inputs, outputs, kernel, padding="same", **{**numbers, "stride": 1})
    mode = draw.choice(["reflect", "replicate", "circular"]) if kind < 0.42 else "zeros"
    return nn.Conv2d(inputs, outputs, kernel, padding=draw.randint(0, 5), padding_mode=mode, **numbers)


def deal(count: int, parts: int) -> list[range]:
    return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def take(tensor: Tensor, dim: int, part: range) -> Tensor:
    return tensor.narrow(dim, part.start, len(part))


def is_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous()


if __name__ == "__main__":
    main()
