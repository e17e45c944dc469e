"""Training on a GPU from files: images a second beside those of images that lie on the GPU.

PYTHONPATH=$PWD python benchmarks/feeding.py --work DIR

ResNet-50 at 224 pixels, bf16, compiled, random resized crops, from a folder of JPEGs of 500 × 375 (smooth
noise, quality 95, 54 KB each), from the same by nvJPEG, and from a pack of raw pixels of 256. Then emotion48
on a folder of 28,709 grey JPEGs of 48 × 48: its first epoch with the decoding of all images, and later ones.
Each is a run of `lockstep train`; rates are of its epochs but the first, by the times of their steps.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from decode import encode
from measure import make_parser, make_record
from PIL import Image

from lockstep.spec.record import Record, write_records

COUNT, DISTINCT, SMALL = 12288, 64, 28709
LARGE = ["model.name=resnet50", "data.size=224", "data.channels=3", "train.batch=256", "train.lanes=1"]
LARGE += ["train.precision=bf16", "kernels.set=compiled", "optimizer.lr=0.01", "schedule.warmup_epochs=0"]
CROPS = "data.augment=random_resized_crop,flip"
EMOTION = ["model.name=emotion48", "data.size=48", "data.channels=1", "train.batch=1024", "train.lanes=8"]
EMOTION += ["train.precision=bf16", "optimizer.lr=0.01", "train.epochs=4", "schedule.warmup_epochs=0"]


def main() -> None:
    parser = make_parser(__doc__, "feeding-gpu.json")
    parser.add_argument("--work", type=Path, required=True, help="a folder with 4 GB to spare")
    parser.add_argument("--cases", nargs="+", default=["resident", "raw", "jpeg", "nvjpeg", "small"])
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    photos, small, pack = (options.work / name for name in ("photos", "small", "pack"))
    start = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        files = list(pool.map(encode, range(DISTINCT), [95] * DISTINCT))
    write_folder(photos, [files[number % DISTINCT] for number in range(COUNT)])
    write_folder(small, [shrink(file) for file in files] * (SMALL // DISTINCT + 1), SMALL)
    print(f"made in {time.perf_counter() - start:.1f} s", flush=True)
    if "raw" in options.cases:
        words = ["data", "pack", str(photos), str(pack), "--raw", "--size", "256"]
        subprocess.run([sys.executable, "-m", "lockstep", *words], check=True)
    folder = ["data.name=folder", f"data.dir={photos}", "data.val_fraction=0.01", CROPS]
    cases: dict[str, list[str]] = {
        "resident": ["data.name=shapes", "data.num_train=4096", "data.num_test=256", "data.augment=flip"],
        "raw": ["data.name=pack", f"data.dir={pack}", CROPS],
        "jpeg": folder,
        "nvjpeg": [*folder, "data.decoder=nvjpeg"],
    }
    records: list[Record] = []
    found: dict[str, float] = {}
    for name, keys in cases.items():
        if name in options.cases:
            run = train([*LARGE, f"train.epochs={options.epochs}", *keys], options.work / f"run-{name}")
            rates = epoch_rates(run)
            found[name] = sorted(rates[1:])[len(rates[1:]) // 2]
            share = {"of_resident": found[name] / found["resident"]} if "resident" in found else {}
            title = f"ResNet-50 at 224, {name}: images a second"
            told = {**share, "cpu_s": run["cpu_s"], "wall_s": run["wall_s"], "first_epoch": rates[0]}
            records.append(make_record(title, rates[1:], "img/s", **told, data_wait_s=run["data_wait_s"]))
            print(f"{title}: {found[name]:.0f} {told}", flush=True)
            write_records(options.output, records)
    if "small" in options.cases:
        records += measure_small(small, options.work)
        write_records(options.output, records)


def measure_small(folder: Path, work: Path) -> list[Record]:
    """The first epoch with all decoding, and those after it."""
    code = (
        "import sys, time, torch; from pathlib import Path; from lockstep.data.catalog import open_store\n"
        "torch.zeros(1, device='cuda')\n"
        "store = open_store('folder', Path(sys.argv[1]), {'size': 48, 'channels': 1, 'val_fraction': 0.01})\n"
        "start = time.perf_counter(); store.train.in_memory(); print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    decode_s = [float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(3)]
    keys = [*EMOTION, "data.name=folder", f"data.dir={folder}", "data.val_fraction=0.01", "kernels.set=fused"]
    run = train(keys, work / "run-small")
    rates = epoch_rates(run)
    first = [run["samples"] / (each + run["samples"] / rates[0]) for each in decode_s]
    name = "28,709 JPEGs of 48 × 48, emotion48, fused"
    print(f"{name}: {first} {rates} decoded in {decode_s}", flush=True)
    return [
        make_record(
            f"{name}: first epoch, with the decoding", first, "img/s", decode_s=decode_s, limit=30000
        ),
        make_record(f"{name}: later epochs", rates[1:], "img/s"),
    ]


def train(keys: list[str], folder: Path) -> dict[str, Any]:
    """The summary of a run, the rows of its steps, and the seconds it took."""
    words = [word for key in keys for word in ("-o", key)]
    command = [sys.executable, "-m", "lockstep", "train", "shapes", *words, "--quiet", "--device", "cuda"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*command, "--runs-dir", str(folder), "--name", "run"], check=True, env={**os.environ})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    run["rows"] = [row for row in rows if row["kind"] == "step"]
    run["cpu_s"] = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    run["wall_s"] = time.perf_counter() - start
    first = [row for row in run["rows"] if not row["epoch"]]
    run["samples"] = first[-1]["positions"][1]
    return run


def epoch_rates(run: dict[str, Any]) -> list[float]:
    """Images a second of every epoch, by the times of its steps."""
    rates = []
    for epoch in range(run["epochs"]):
        rows = [row for row in run["rows"] if row["epoch"] == epoch]
        batches = [row["positions"][1] - row["positions"][0] for row in rows]
        rates.append(sum(batches) / sum(n / row["img_s"] for n, row in zip(batches, rows, strict=True)))
    return rates


def write_folder(folder: Path, files: list[bytes], count: int | None = None) -> None:
    """So many files in ten classes."""
    for number, data in enumerate(files[:count]):
        place = folder / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06}.jpg").write_bytes(data)


def shrink(data: bytes) -> bytes:
    """A grey JPEG of 48 × 48."""
    import io

    stream = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("L").resize((48, 48)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


if __name__ == "__main__":
    main()
