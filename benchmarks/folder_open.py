"""How long a folder of a million images takes to open: the first time, and again with the sizes kept.

The files are links to one small JPEG in a thousand classes. Each opening is a process of its own.

python benchmarks/folder_open.py --images 1000000 --repeats 3
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import make_parser, make_record
from PIL import Image

from lockstep.spec.record import write_records

NUM_CLASSES = 1000
OPEN = """
import json, resource, sys, time
from pathlib import Path
from lockstep.data.catalog import open_store
import lockstep.data.images.folder

start = time.perf_counter()
store = open_store("folder", Path(sys.argv[1]), {"size": 32})
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([time.perf_counter() - start, memory, len(store.train)]))
"""


def main() -> None:
    parser = make_parser(__doc__, "folder-open-cpu.json")
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images", options.images)
        env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        found = [open_once(folder / "images", env) for _ in range(1 + options.repeats)]
    details = {"images": found[0][2], "cores": os.cpu_count(), "files_are_in_the_page_cache": True}
    again = found[1:]
    records = [
        make_record("opening a folder, first time", [found[0][0]], "s", **details),
        make_record("opening a folder, again", [row[0] for row in again], "s", **details),
        make_record("memory of the process then", [row[1] for row in again], "MB", **details),
    ]
    write_records(options.output, records)
    for record in records:
        print(
            f"{record.name}: {record.value:.2f} {record.unit} ({record.spread[0]:.2f}–{record.spread[1]:.2f})"
        )


def make_images(folder: Path, count: int) -> None:
    """Links to one JPEG a class, and an image of each class to validate on."""
    stream = io.BytesIO()
    Image.new("RGB", (48, 48), (1, 100, 3)).save(stream, "JPEG")
    for label in range(NUM_CLASSES):
        for split, number in (("train", count // NUM_CLASSES), ("val", 1)):
            place = folder / split / f"class{label:04d}"
            place.mkdir(parents=True)
            first = place / "image000000.jpg"
            first.write_bytes(stream.getvalue())
            for i in range(1, number):
                os.link(first, place / f"image{i:06d}.jpg")


def open_once(folder: Path, env: dict[str, str]) -> list[float]:
    """Open it in a process of its own; seconds, megabytes, images."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder)], check=True, capture_output=True, text=True, env=env
    )
    return list(json.loads(done.stdout))


if __name__ == "__main__":
    main()
