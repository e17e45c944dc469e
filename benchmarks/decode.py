"""Random resized crops of 224 from JPEGs of 500 × 375 and from raw pixels: images a second, beside Pillow.

All cases decode the same images to the same boxes, in as many threads as there are cores; a DataLoader has as
many processes, and so has WebDataset, if it is installed. Rounds of all cases alternate. The images are made:
smooth noise of several sizes, as photographs have it, saved at quality 95 (about 54 KB) and 98 (about 91 KB).

python benchmarks/decode.py --rounds 7
"""

from __future__ import annotations

import importlib.util
import io
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from measure import make_parser, make_record
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.data.catalog import open_store
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.images.random_box import draw_boxes, read_random_boxes
from lockstep.data.images.view_options import View
from lockstep.spec.record import Record, write_records

HEIGHT, WIDTH, SIZE, RAW = 375, 500, 224, 256
COUNT, DISTINCT = 512, 32
SCALE = 0.08, 1.0
Box = tuple[int, int, int, int]


class Made:
    """JPEGs in memory, each many times."""

    def __init__(self, quality: int) -> None:
        self.files = [encode(number, quality) for number in range(DISTINCT)]

    def __len__(self) -> int:
        return COUNT

    def read(self, index: int) -> bytes:
        return self.files[index % DISTINCT]

    def where(self, index: int) -> str:
        return f"image {index}"

    def sizes(self, ids: Tensor) -> Tensor:
        return torch.tensor([HEIGHT, WIDTH]).expand(len(ids), 2)


class WithPillow(Dataset[Tensor]):
    """What torchvision's RandomResizedCrop does to a Pillow image, without the rest of torchvision."""

    def __init__(self, source: Made) -> None:
        self.source = source

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        sizes = torch.tensor([[HEIGHT, WIDTH]])
        top, left, height, width = draw_boxes(torch.tensor([index]), sizes, 0, 0, SCALE)[0].tolist()
        return torch.from_numpy(crop_by_pillow(self.source.read(index), (top, left, height, width)).copy())


def main() -> None:
    parser = make_parser(__doc__, "decode-cpu.json")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, tempfile.TemporaryDirectory() as folder:
        for quality in (95, 98):
            records += compare(quality, options.rounds, pool, folder)
    write_records(options.output, records)


def compare(quality: int, rounds: int, pool: ThreadPoolExecutor, folder: str) -> list[Record]:
    """The records of one kind of image."""
    source, ids = Made(quality), torch.arange(COUNT)
    boxes = draw_boxes(ids, source.sizes(ids), 0, 0, SCALE).tolist()
    split = EncodedSplit(source, ids, View((3, SIZE, SIZE)), "")
    pictures = [np.asarray(Image.open(io.BytesIO(data)).resize((RAW, RAW))) for data in source.files]
    samples, place = [(pictures[i % DISTINCT], i % 2) for i in range(COUNT)], Path(folder, f"pack-{quality}")
    lockstep.pack((samples, samples[:2]), place, raw=True)
    raw = open_store("pack", place, {"size": SIZE}).train
    loader = DataLoader(WithPillow(source), 64, num_workers=len(os.sched_getaffinity(0)))
    cases: dict[str, Callable[[], object]] = {
        "full decode alone": lambda: list(pool.map(simplejpeg.decode_jpeg, map(source.read, range(COUNT)))),
        "Pillow": lambda: list(pool.map(crop_by_pillow, map(source.read, range(COUNT)), boxes)),
        "Lockstep": lambda: [read_random_boxes(split, part, 0, 0, SCALE) for part in ids.split(64)],
        "Lockstep, raw pixels of 256": lambda: [
            read_random_boxes(raw, part, 0, 0, SCALE) for part in ids.split(64)
        ],
        "DataLoader with Pillow": lambda: list(loader),
    }
    if importlib.util.find_spec("webdataset"):
        web = open_webdataset(source, boxes, Path(folder, f"tar-{quality}"))
        cases["WebDataset with Pillow"] = lambda: list(web)
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, work in cases.items():
            start = time.perf_counter()
            work()
            if turn:  # the first is to warm up
                rates[name].append(COUNT / (time.perf_counter() - start))
    about = {
        "quality": quality,
        "kilobytes": round(sum(map(len, source.files)) / DISTINCT / 1000, 1),
        "threads": len(os.sched_getaffinity(0)),
    }
    found = [
        make_record(f"{name}, quality {quality}", values, "img/s", **about) for name, values in rates.items()
    ]
    for name, over in (
        ("Lockstep", "Pillow"),
        ("Lockstep", "full decode alone"),
        *(("Lockstep", name) for name in cases if name.endswith("with Pillow")),
        ("Lockstep, raw pixels of 256", "Lockstep"),
    ):
        ratios = [a / b for a, b in zip(rates[name], rates[over], strict=True)]
        found.append(make_record(f"{name} over {over}, quality {quality}", ratios, "ratio", **about))
    for record in found:
        print(
            f"{record.name}: {record.value:.2f} {record.unit} ({record.spread[0]:.2f}–{record.spread[1]:.2f})"
        )
    return found


def open_webdataset(source: Made, boxes: list[Box], folder: Path) -> Any:
    """The same images in four tar shards, read by as many processes as there are cores."""
    import webdataset

    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/%d.tar", maxcount=COUNT // 4, verbose=0) as writer:
        for index in range(COUNT):
            writer.write({"__key__": f"{index:06}", "jpg": source.read(index)})

    def crop(sample: dict[str, Any]) -> Tensor:
        return torch.from_numpy(crop_by_pillow(sample["jpg"], boxes[int(sample["__key__"])]).copy())

    shards = sorted(map(str, folder.glob("*.tar")))
    samples = webdataset.WebDataset(shards, shardshuffle=False).map(crop).batched(64)
    return DataLoader(samples, batch_size=None, num_workers=len(os.sched_getaffinity(0)))


def crop_by_pillow(data: bytes, box: Box) -> np.ndarray:
    """Decode, crop and resize by Pillow."""
    top, left, height, width = box
    with Image.open(io.BytesIO(data)) as file:
        part = file.convert("RGB").crop((left, top, left + width, top + height))
    return np.asarray(part.resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def encode(seed: int, quality: int) -> bytes:
    """A JPEG of smooth noise: five layers, the finer the weaker."""
    random, total, layers = np.random.default_rng(seed), 0.0, np.zeros((HEIGHT, WIDTH, 3))
    for level, weight in ((0, 1), (1, 2), (2, 4), (4, 16), (6, 64)):
        coarse = random.integers(0, 256, (max(2, HEIGHT >> level), max(2, WIDTH >> level), 3), dtype=np.uint8)
        fine = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        layers, total = layers + weight * np.asarray(fine, float), total + weight
    pixels = ((layers / total - 128) * 1.6 + 128).clip(0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


if __name__ == "__main__":
    main()
