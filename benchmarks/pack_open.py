"""How long a pack of a million tiny images takes to be made and to be opened, and the memory it takes.

python benchmarks/pack_open.py --images 1000000 --folder /tmp/somewhere
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import make_parser, make_record
from PIL import Image

from lockstep.spec.record import write_records

NUM_CLASSES = 100
OPEN = """
import json, resource, sys, time
from pathlib import Path
import lockstep.data.pack.pack_set
from lockstep.data.catalog import open_store

def rss_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before, start = rss_mb(), time.perf_counter()
store = open_store("pack", Path(sys.argv[1]), {})
print(json.dumps({"seconds": time.perf_counter() - start, "before_mb": before, "after_mb": rss_mb(),
                  "images": len(store.train) + len(store.test)}))
"""


def main() -> None:
    parser = make_parser(__doc__, "pack-open-cpu.json")
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the images and the pack; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = make_images(folder / "images", options.images)
        start = time.perf_counter()
        words = ["data", "pack", str(folder / "images"), str(folder / "pack")]
        subprocess.run([sys.executable, "-m", "lockstep", *words], check=True)
        packing_s = time.perf_counter() - start
        print(f"packed in {packing_s:.0f} s")
        found = [open_once(folder / "pack") for _ in range(options.repeats)]
        pack_mb = sum(path.stat().st_size for path in (folder / "pack").iterdir()) / 1e6
    details = {
        "images": found[0]["images"],
        "bytes_an_image": size,
        "packing_s": round(packing_s, 1),
        "pack_mb": round(pack_mb, 1),
        "cores": os.cpu_count(),
        "files_are_in_the_page_cache": True,
    }
    grown = [row["after_mb"] - row["before_mb"] for row in found]
    records = [
        make_record("opening a pack of tiny images", [row["seconds"] for row in found], "s", **details),
        make_record("memory that opening it adds", grown, "MB", **details),
        make_record("memory of the whole process then", [row["after_mb"] for row in found], "MB", **details),
    ]
    write_records(options.output, records)
    for record in records:
        print(
            f"{record.name}: {record.value:.3f} {record.unit} ({record.spread[0]:.3f}–{record.spread[1]:.3f})"
        )


def make_images(folder: Path, count: int) -> int:
    """Copies of one PNG file in 100 classes, and a few to validate on; gives its size."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    data = stream.getvalue()
    for split, number in (("train", count), ("val", 10 * NUM_CLASSES)):
        for label in range(NUM_CLASSES):
            place = folder / split / f"{label:03d}"
            place.mkdir(parents=True)
            for i in range(number // NUM_CLASSES):
                (place / f"{i}.png").write_bytes(data)
    return len(data)


def open_once(pack: Path) -> dict[str, float]:
    """Open it in a process of its own; seconds and megabytes."""
    done = subprocess.run([sys.executable, "-c", OPEN, str(pack)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
