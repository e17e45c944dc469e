"""One worker of `lockstep probe`: measures together with the others; worker 0 writes the cluster's file.

The command starts it as `python -m` with the path of the result, the device, the effort and a folder.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from lockstep.elastic.worker_groups import WorkerGroups
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.measure.probe import FULL, QUICK, Machine, probe_machine
from lockstep.spec.cluster_file import write_cluster
from lockstep.spec.world import World, read_world

_HEIGHT, _WIDTH, _CROP = 375, 500, 224
_NOISE = {1: 0.12, 4: 0.2, 16: 0.28, 64: 0.4}  # pixels of a spot, share of all: 113 KB, as ImageNet's average
_BOX = 38, 100, 300, 300  # top, left, height, width: half of the image, as a random crop takes on average


def work(result: Path, device_name: str, is_quick: bool, folder: Path, world: World | None = None) -> None:
    """Probe this machine; as worker 0, write what was found to `result`."""
    with plain_torch():
        device = prepare_device(device_name, threads=1, local_rank=world.local_rank if world else None)
        group = WorkerGroups(world, "auto", device).next()
        machine = Machine(device, folder, make_decode())
        cluster = probe_machine(group, machine, QUICK if is_quick else FULL, _tell)
        if cluster:
            result.write_text(write_cluster(cluster), encoding="utf-8")
        group.close()


def _tell(line: str) -> None:
    print(f"probe: {line}", file=sys.stderr, flush=True)


def make_decode() -> Callable[[], object]:
    """A call that decodes one JPEG, of an image that is as smooth and as rough as a photograph."""
    import numpy as np
    from PIL import Image

    from lockstep.data.decoding.decode import cut_image

    random, pixels = np.random.default_rng(0), np.zeros((_HEIGHT, _WIDTH, 3))
    for step, share in _NOISE.items():
        noise = random.integers(0, 256, (_HEIGHT // step, _WIDTH // step, 3), dtype=np.uint8)
        smooth = Image.fromarray(noise).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
        pixels += share * np.asarray(smooth)
    data = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(data, "JPEG", quality=95)
    encoded, out = data.getvalue(), np.empty((3, _CROP, _CROP), np.uint8)
    return lambda: cut_image(encoded, _BOX, out)


if __name__ == "__main__":
    _, path, device, effort, where = sys.argv
    work(Path(path), device, effort == "quick", Path(where), read_world(os.environ))
