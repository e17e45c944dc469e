"""Kill `lockstep data pack` with SIGKILL at random moments, run it again each time, and compare the pack.

python benchmarks/pack_kills.py --kills 100

Packs are made one after another until there were so many kills; each is killed several times. Whenever a
pack is whole, it is compared, file by file, with one that was left alone.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import make_parser, make_record
from PIL import Image

from lockstep.spec.record import write_records

SHARD_MB = 0.1
SPLITS = {"train": 400, "val": 40}  # images of each of three classes


def main() -> None:
    parser = make_parser(__doc__, "pack-kills-cpu.json")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    moments, others, kept, packs = random.Random(options.seed), [], [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images")
        start = time.perf_counter()
        subprocess.run(command(folder, "whole"), check=True, stdout=subprocess.DEVNULL)
        print(f"a pack left alone takes {time.perf_counter() - start:.1f} s")
        whole = hash_tree(folder / "whole")
        while len(kept) < options.kills:
            while not (folder / "killed").exists() and len(kept) < options.kills:
                if pack_and_kill(folder, moments.uniform(0.0, 0.1)):
                    kept.append(len(list((folder / "killed.part").glob("*.tar"))))
                    print(f"kill {len(kept)}: {kept[-1]} shards are there")
            if not (folder / "killed").exists():
                subprocess.run(command(folder, "killed"), check=True, stdout=subprocess.DEVNULL)
            others.append(float(hash_tree(folder / "killed") != whole or (folder / "killed.part").exists()))
            packs += 1
            shutil.rmtree(folder / "killed")
    print(f"{packs} packs, {len(kept)} kills, {sum(others):.0f} packs that differ")
    record = make_record(
        "packs killed and resumed to other bytes than the pack left alone",
        others,
        "packs",
        kills=len(kept),
        packs=packs,
        shards_at_each_kill=kept,
        files=len(whole),
        cores=os.cpu_count(),
    )
    write_records(options.output, [record])
    sys.exit(1 if any(others) else 0)


def make_images(folder: Path) -> None:
    """Three classes of small JPEG files of noise."""
    random_pixels = np.random.default_rng(0)
    for split, count in SPLITS.items():
        for label in ("a", "b", "c"):
            place = folder / split / label
            place.mkdir(parents=True)
            for i in range(count):
                stream = io.BytesIO()
                pixels = random_pixels.integers(0, 256, (40 + i % 7, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(stream, "JPEG")
                (place / f"{i}.jpg").write_bytes(stream.getvalue())


def command(folder: Path, name: str) -> list[str]:
    words = [str(folder / "images"), str(folder / name), "--shard-mb", str(SHARD_MB)]
    return [sys.executable, "-m", "lockstep", "data", "pack", *words]


def pack_and_kill(folder: Path, wait_s: float) -> bool:
    """Start or resume, kill it `wait_s` after it began to work; whether it was killed before its end."""
    journal = folder / "killed.part" / "unfinished" / "journal.jsonl"
    before = journal.stat().st_size if journal.exists() else 0
    process = subprocess.Popen(command(folder, "killed"), stdout=subprocess.DEVNULL)
    while process.poll() is None and not (journal.exists() and journal.stat().st_size > before):
        time.sleep(0.001)
    time.sleep(wait_s)
    process.kill()
    return process.wait() < 0


def hash_tree(folder: Path) -> dict[str, str]:
    """The hash of every file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


if __name__ == "__main__":
    main()
